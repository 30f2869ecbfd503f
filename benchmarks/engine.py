"""How fast is the torch engine, beside transformers' `generate` on the same model, dtype and threads?

    python -m benchmarks.engine --json [--dtype bfloat16] [--threads 1] [--rounds 5] [--batches 1 8 32]

The engine runs whole: its thread, scheduler, block pool and runner. Both sides do the same work in
alternating rounds, so that a noisy machine disturbs both:

    decode   `batch` prompts of 64 tokens, then 24 new tokens each. Both sides note when each step ended;
             the steps after the first token count, so prefill does not.
    prefill  one prompt of 512 tokens to its first token (in one chunk).

`--json` prints one object: tokens per second by batch, and `ratio`, engine / generate. Both follow from the
lower quartile of the step times of all rounds, which other work on the machine moves least. Without it a
table.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

# OpenMP reads these when torch is loaded: threads that wait must not burn the core others need.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ["GOMP_SPINCOUNT"] = "0"

if TYPE_CHECKING:
    from serving.engine.base import Engine, StepOutput

PROMPT_TOKENS = 64
NEW_TOKENS = 24
PREFILL_TOKENS = 512
PREFILL_REPEATS = 3  # prompts per round
FIRST_TOKEN_ID, LAST_TOKEN_ID = 100, 40_000  # plain words: no special token among random prompts
KV_BYTES = 1 << 30

Steps = list[float]  # seconds of each


@dataclass(slots=True)
class Measured:
    """Seconds of every step (decode) or prompt (prefill) of all rounds."""

    engine: list[float] = field(default_factory=list)
    generate: list[float] = field(default_factory=list)

    @property
    def engine_s(self) -> float:
        return _lower_quartile(self.engine)

    @property
    def generate_s(self) -> float:
        return _lower_quartile(self.generate)


def _lower_quartile(values: list[float]) -> float:
    return statistics.quantiles(values, n=4, method="inclusive")[0] if len(values) > 1 else values[0]


class Prompts:
    """Random prompts, never the same twice: nothing may be found in the prefix cache."""

    def __init__(self) -> None:
        import numpy as np

        self._numbers = np.random.default_rng(1)

    def next(self, batch: int, n_tokens: int) -> list[list[int]]:
        drawn = self._numbers.integers(FIRST_TOKEN_ID, LAST_TOKEN_ID, size=(batch, n_tokens))
        return [[int(token) for token in row] for row in drawn]


class EngineSide:
    """Drives a started engine and keeps the time of every step's end."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._attempts = count(1)
        self._left = 0
        self._step_ends: list[tuple[float, int]] = []  # (time, tokens in the output)
        self._finished = threading.Event()
        self._failed: str | None = None
        engine.start(self._on_step)

    def run(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, list[tuple[float, int]]]:
        """Submit all prompts at once; the time of that, and every later step's (end, tokens)."""
        from serving.engine.base import AttemptId, Mode, SamplingParams, Work

        params = SamplingParams(max_tokens=new_tokens, seed=0, temperature=0.0, ignore_eos=True)
        self._finished.clear()
        self._step_ends = []
        self._left = len(prompts)
        works = [
            Work(AttemptId(next(self._attempts)), Mode.LOCAL, array("I", prompt), len(prompt), params, 0)
            for prompt in prompts
        ]
        began = time.perf_counter()
        for work in works:
            self._engine.submit(work)
        self._finished.wait()
        if self._failed is not None:
            raise SystemExit(f"the engine failed: {self._failed}")
        return began, self._step_ends

    def _on_step(self, output: StepOutput) -> None:
        if output.tokens:
            self._step_ends.append((time.perf_counter(), len(output.tokens)))
        for failed in output.failed:
            self._failed = failed.message
        self._left -= len(output.finished) + len(output.failed)
        if self._left == 0:
            self._finished.set()

    def decode_s(self, prompts: list[list[int]]) -> list[float]:
        _, ends = self.run(prompts, NEW_TOKENS)
        full = [end for end, tokens in ends if tokens == len(prompts)]  # every prompt is done by then
        return [later - earlier for earlier, later in pairwise(full)]

    def prefill_s(self, prompts: list[list[int]]) -> list[float]:
        runs = [self.run([prompt], 1) for prompt in prompts]
        return [ends[0][0] - began for began, ends in runs]


class GenerateSide:
    """The same through transformers: greedy `generate` with its cache, no padding."""

    def __init__(self, directory: Path, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        bars: Any = logging
        bars.disable_progress_bar()  # stdout and stderr are ours
        self._torch = torch
        loaded: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
        self._model = loaded.eval()
        self._model.generation_config.eos_token_id = None  # random prompts: nothing may stop early

    def run(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, list[float]]:
        """The start, and the time at which each step's logits were there."""
        ids = self._torch.tensor(prompts)
        ends: list[float] = []

        def noted(_ids: Any, scores: Any) -> Any:
            ends.append(time.perf_counter())
            return scores

        began = time.perf_counter()
        self._model.generate(
            ids,
            attention_mask=self._torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            use_cache=True,
            logits_processor=[noted],
        )
        return began, ends

    def decode_s(self, prompts: list[list[int]]) -> list[float]:
        _, ends = self.run(prompts, NEW_TOKENS)
        return [later - earlier for earlier, later in pairwise(ends)]

    def prefill_s(self, prompts: list[list[int]]) -> list[float]:
        runs = [self.run([prompt], 1) for prompt in prompts]
        return [ends[0] - began for began, ends in runs]


def measure(
    directory: Path,
    *,
    dtype: str,
    threads: int,
    rounds: int,
    batches: list[int],
    report: Callable[[str, float], None],
) -> dict[str, Any]:
    """The object that `--json` prints."""
    import torch

    from serving.config import EngineConfig
    from serving.engine.torch.build import build_torch_engine

    torch.set_num_threads(threads)
    report("loading", 0.0)
    config: Any = {"dtype": dtype, "threads": threads, "kv_bytes": KV_BYTES, "max_batch": max(batches)}
    # One chunk for all prompts of a batch: generate also computes them at once.
    config["chunk_tokens"] = max(PREFILL_TOKENS, PROMPT_TOKENS * max(batches))
    engine = build_torch_engine(EngineConfig(**config), directory)
    ours, theirs = EngineSide(engine), GenerateSide(directory, dtype)
    prompts = Prompts()
    decode = {batch: Measured() for batch in batches}
    prefill = Measured()
    done, total = 0, (rounds + 1) * (len(batches) + 1)
    for number in range(rounds + 1):  # the first one warms up
        for batch, measured in decode.items():
            report(f"round {number} of {rounds}, decode at batch {batch}", done / total)
            texts = prompts.next(batch, PROMPT_TOKENS)
            _in_turn(number, measured, partial(ours.decode_s, texts), partial(theirs.decode_s, texts))
            done += 1
        report(f"round {number} of {rounds}, prefill", done / total)
        texts = prompts.next(PREFILL_REPEATS, PREFILL_TOKENS)
        _in_turn(number, prefill, partial(ours.prefill_s, texts), partial(theirs.prefill_s, texts))
        done += 1
    engine.stop()
    return {
        "decode_tok_s": {str(batch): round(batch / m.engine_s, 2) for batch, m in decode.items()},
        "generate_tok_s": {str(batch): round(batch / m.generate_s, 2) for batch, m in decode.items()},
        "ratio": {str(batch): round(m.generate_s / m.engine_s, 3) for batch, m in decode.items()},
        "prefill_tok_s": round(PREFILL_TOKENS / prefill.engine_s, 1),
        "generate_prefill_tok_s": round(PREFILL_TOKENS / prefill.generate_s, 1),
        "dtype": dtype,
        "threads": threads,
        "model": directory.name,
    }


def _in_turn(number: int, into: Measured, ours: Callable[[], Steps], theirs: Callable[[], Steps]) -> None:
    """Both sides once; who goes first alternates, and round 0 is not kept."""
    sides = [(ours, into.engine), (theirs, into.generate)]
    for side, kept in sides if number % 2 else reversed(sides):
        seconds = side()
        if number:
            kept.extend(seconds)


def _table(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{result['model']}, {result['dtype']}, {result['threads']} thread(s)")
    table.add_column("tokens per second")
    for column in ("engine", "generate", "engine / generate"):
        table.add_column(column, justify="right")
    for batch, ratio in result["ratio"].items():
        values = (result["decode_tok_s"][batch], result["generate_tok_s"][batch])
        table.add_row(f"decode, batch {batch}", *(f"{value:.1f}" for value in values), f"{ratio:.2f}")
    ours, theirs = result["prefill_tok_s"], result["generate_prefill_tok_s"]
    table.add_row(
        f"prefill, {PREFILL_TOKENS} tokens", f"{ours:.0f}", f"{theirs:.0f}", f"{ours / theirs:.2f}"
    )
    Console().print(table)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else on stdout"
    )
    parser.add_argument("--model", default="smollm2-135m", help="a known name or a directory")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32", "float16"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, after one that warms up")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    options = parser.parse_args(arguments)
    if min(options.rounds, options.threads, *options.batches) < 1:
        parser.error("--rounds, --threads and --batches must be at least 1")

    from serving.manifest import resolve_weights
    from serving.progress import shown_progress

    directory = resolve_weights(options.model)
    silent = options.json and not sys.stderr.isatty()
    with shown_progress("engine benchmark", (lambda stage, share: None) if silent else None) as report:
        result = measure(
            directory,
            dtype=options.dtype,
            threads=options.threads,
            rounds=options.rounds,
            batches=options.batches,
            report=report,
        )
    if options.json:
        print(json.dumps(result))
    else:
        _table(result)


if __name__ == "__main__":
    main()
