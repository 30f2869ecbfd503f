"""What a simulated model answers when nothing is broken: the same engine in this process, unpaced."""

from __future__ import annotations

import itertools
import threading
from array import array
from collections.abc import Sequence

from benchmarks.fault_client import Ask
from serving.config import EngineConfig, SimProfile, Variant
from serving.engine.base import AttemptId, Mode, SamplingParams, StepOutput, Work
from serving.engine.factory import build_engine
from serving.manifest import resolve_weights
from serving.tokenizer import Tokenizer

CONTEXT_TOKENS = 32_768
ANSWER_S = 60.0


class SimReference:
    """One engine; `stop` ends it."""

    def __init__(self, weights: str = "smollm2-135m") -> None:
        tokenizer = Tokenizer.from_file(resolve_weights(weights) / "tokenizer.json")
        self._names = [raw.decode(errors="replace") for raw in tokenizer.token_bytes]
        profile = SimProfile(context_tokens=CONTEXT_TOKENS, kv_bytes_per_token=8)
        config = EngineConfig(kind="sim", profile=profile, kv_bytes=8 << 20, chunk_tokens=8192)
        self._engine = build_engine(Variant(weights=weights, engine=config))
        self._known: dict[tuple[tuple[int, ...], int | None], list[str]] = {}
        self._drawn: dict[int, list[int]] = {}
        self._numbers = itertools.count()  # an engine remembers what an attempt was
        self._left = 0
        self._done = threading.Event()
        self._engine.start(self._on_step)

    def learn(self, asks: Sequence[Ask]) -> None:
        """Answer those that are not known yet."""
        asks = [ask for ask in asks if len(self._known.get((ask.prompt, ask.seed), ())) < ask.max_tokens]
        if not asks:
            return
        self._done.clear()
        self._left = len(asks)
        numbers = [next(self._numbers) for _ in asks]
        self._drawn = {number: [] for number in numbers}
        for number, ask in zip(numbers, asks, strict=True):
            params = SamplingParams(
                max_tokens=ask.max_tokens,
                seed=ask.seed or 0,
                temperature=0.0 if ask.seed is None else 1.0,
                ignore_eos=True,
            )
            prompt = array("I", ask.prompt)
            self._engine.submit(Work(AttemptId(number), Mode.LOCAL, prompt, len(prompt), params, 0))
        if not self._done.wait(ANSWER_S):
            raise TimeoutError("the reference engine does not answer")
        for number, ask in zip(numbers, asks, strict=True):
            self._known[ask.prompt, ask.seed] = [self._names[token] for token in self._drawn.pop(number)]

    def answer(self, ask: Ask) -> list[str]:
        """Of an ask that was learnt, whatever its salt; up to its stop string, if it has one."""
        names = self._known[ask.prompt, ask.seed][: ask.n_shown]
        return names if ask.named_tokens else [name.removeprefix(" ") for name in names]

    def stop(self) -> None:
        self._engine.stop()

    def _on_step(self, output: StepOutput) -> None:
        for attempt, token in zip(output.attempts, output.tokens, strict=True):
            self._drawn[attempt].append(token)
        self._left -= len(output.finished) + len(output.failed)
        if self._left == 0:
            self._done.set()
