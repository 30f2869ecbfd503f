"""TensorRT-LLM engines over the fake package, and what comes out of them."""

from __future__ import annotations

import json
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

from serving.config import EngineConfig, Parallel, TrtllmConfig
from serving.engine.base import AttemptId, ChunkReady, Mode, SamplingParams, StepOutput, StoredRun, Work
from serving.engine.trtllm.build import build_trtllm_engine
from serving.engine.trtllm.engine import TrtllmEngine
from tests.fake_trtllm.contract import PROFILES
from tests.fake_trtllm.machine import Machine
from tests.fake_trtllm.package import installed

BLOCK: Literal[8] = 8
EOS = 2
DEADLINE_S = 20.0
NAMESPACE = 0x1234_5678_9ABC_DEF0
versions = pytest.mark.parametrize("version", PROFILES)


def save_model(directory: Path, *, eos: int = EOS, context: int = 1024, **fake: Any) -> Path:
    """A checkpoint with no weights worth the name. `fake`: what the fake reads (tests/fake_trtllm)."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "llama",
        "max_position_embeddings": context,
        "vocab_size": 320,
        "eos_token_id": eos,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 32,
        "fake": fake,
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    return directory


def engine_config(**trtllm: Any) -> EngineConfig:
    settings = {"transfer_timeout_ms": 3000.0, **trtllm}
    return EngineConfig(
        kind="tensorrt_llm", block_tokens=BLOCK, max_batch=32, trtllm=TrtllmConfig(**settings)
    )


class Heard:
    """An engine that was started, and everything it said."""

    def __init__(self, engine: TrtllmEngine) -> None:
        self.engine = engine
        self.outputs: list[StepOutput] = []
        self._news = threading.Condition()
        engine.start(self._hear)

    @property
    def machine(self) -> Machine:
        machine: Machine = self.engine._llm.machine
        return machine

    def _hear(self, output: StepOutput) -> None:
        with self._news:
            self.outputs.append(output)
            self._news.notify_all()

    def until(self, condition: Callable[[], object], seconds: float = DEADLINE_S) -> None:
        """Looked at after every output, and now and then."""
        deadline = threading.Event()
        timer = threading.Timer(seconds, deadline.set)
        timer.start()
        try:
            with self._news:
                while not condition():
                    assert not deadline.is_set(), "it did not come true"
                    self._news.wait(0.02)
        finally:
            timer.cancel()

    def tokens(self, attempt: int) -> dict[int, int]:
        """By position; each is told once."""
        found: dict[int, int] = {}
        for output in list(self.outputs):
            for name, position, token in zip(output.attempts, output.positions, output.tokens, strict=True):
                if name == attempt:
                    assert position not in found, "told twice"
                    found[position] = token
        return found

    def reason(self, attempt: int) -> str | None:
        ended = [f.reason.value for o in list(self.outputs) for f in o.finished if f.attempt == attempt]
        assert len(ended) <= 1
        return ended[0] if ended else None

    def failure(self, attempt: int) -> tuple[str, bool] | None:
        ended = [f for o in list(self.outputs) for f in o.failed if f.attempt == attempt]
        assert len(ended) <= 1
        return (ended[0].message, ended[0].retryable) if ended else None

    def chunk(self, attempt: int) -> ChunkReady | None:
        found = [c for o in list(self.outputs) for c in o.chunks if c.attempt == attempt]
        assert len(found) <= 1
        return found[0] if found else None

    def moved(self, attempt: int) -> bool:
        return any(m.attempt == attempt for o in list(self.outputs) for m in o.moved)

    def cached(self, attempt: int) -> int | None:
        found = [s.n_cached for o in list(self.outputs) for s in o.started if s.attempt == attempt]
        return found[0] if found else None

    def stored(self) -> list[StoredRun]:
        return [run for output in list(self.outputs) for run in output.stored]

    def removed(self) -> list[int]:
        return [block for output in list(self.outputs) for block in output.removed]

    # ------------------------------------------------------------ whole requests

    def local(self, attempt: int, prompt: list[int], **params: Any) -> list[int]:
        self.engine.submit(work(attempt, prompt, **params))
        self.until(lambda: self.reason(attempt) or self.failure(attempt))
        assert self.failure(attempt) is None, self.failure(attempt)
        return [token for _, token in sorted(self.tokens(attempt).items())]

    def prefill(self, attempt: int, prompt: list[int], **params: Any) -> ChunkReady:
        self.engine.submit(work(attempt, prompt, Mode.PREFILL, **params))
        self.until(lambda: self.chunk(attempt) or self.failure(attempt))
        assert self.failure(attempt) is None, self.failure(attempt)
        chunk = self.chunk(attempt)
        assert chunk is not None
        return chunk

    def decode(self, attempt: int, prompt: list[int], chunk: ChunkReady, **params: Any) -> None:
        """Taken over; the tokens are on their way."""
        self.engine.submit(work(attempt, prompt, Mode.DECODE, **params))
        assert chunk.token is not None
        self.engine.take_over(AttemptId(attempt), chunk.token, chunk.state)


def work(attempt: int, prompt: list[int], mode: Mode = Mode.LOCAL, **changes: Any) -> Work:
    """`changes` of Work by its names, all others of SamplingParams."""
    own = {
        name: changes.pop(name)
        for name in ("n_prompt", "namespace", "priority", "adapter", "pull_tokens")
        if name in changes
    }
    params = SamplingParams(**{"max_tokens": 6, "seed": 1, "temperature": 0.0, **changes})
    own.setdefault("n_prompt", len(prompt))
    own.setdefault("namespace", NAMESPACE)
    return Work(AttemptId(attempt), mode, array("I", prompt), params=params, **own)


def prompt(n_tokens: int, salt: int = 0) -> list[int]:
    return [3 + (salt * 31 + i * 7) % 300 for i in range(n_tokens)]


@contextmanager
def running(
    profile: str, directory: Path, role: str = "decode", fake: dict[str, Any] | None = None, **trtllm: Any
) -> Iterator[Heard]:
    """One engine; at its end nothing may be held."""
    save_model(directory, **(fake or {}))
    with installed(profile):
        engine = build_trtllm_engine(engine_config(**trtllm), directory, Parallel(), role)
    heard = Heard(engine)
    try:
        yield heard
    finally:
        engine.stop()
        heard.machine.stop()


@contextmanager
def pair(version: str, directory: Path, **section: Any) -> Iterator[tuple[Heard, Heard]]:
    """A prefill and a decode engine."""
    with (
        running(version, directory / "p", "prefill", **section) as prefill,
        running(version, directory / "d", **section) as decode,
    ):
        yield prefill, decode
