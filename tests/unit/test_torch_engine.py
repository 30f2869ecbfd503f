"""The assembled torch engine (scheduler, pool, thread, runner) gives transformers' tokens in every mode."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.config import EngineConfig
from serving.engine.base import AttemptId, ChunkReady, Mode, Reserved, SamplingParams, StepOutput, Work
from serving.engine.core import EngineCore
from serving.engine.torch.build import build_torch_engine
from tests.unit.test_torch_runner import expected, prompts
from tests.unit.tiny_models import save_tiny_model

NEW = 12
PARAMS = SamplingParams(max_tokens=NEW, seed=0, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("llama"))


class Heard:
    """Starts an engine and collects what it says, by attempt."""

    def __init__(self, directory: Path) -> None:
        config = EngineConfig(dtype="float32", block_tokens=16, kv_bytes=1 << 20, chunk_tokens=64)
        engine = build_torch_engine(config, directory)
        assert isinstance(engine, EngineCore)
        self.engine = engine
        self.tokens: dict[AttemptId, list[int]] = {}
        self.reserved: dict[AttemptId, Reserved] = {}
        self.chunks: dict[AttemptId, list[ChunkReady]] = {}
        self.ended: set[AttemptId] = set()
        self._changed = threading.Condition()
        engine.start(self._on_step)

    def _on_step(self, output: StepOutput) -> None:
        with self._changed:
            assert not output.failed, output.failed
            for attempt, token in zip(output.attempts, output.tokens, strict=True):
                self.tokens.setdefault(attempt, []).append(token)
            for reserved in output.reserved:
                self.reserved[reserved.attempt] = reserved
            for chunk in output.chunks:
                self.chunks.setdefault(chunk.attempt, []).append(chunk)
                if chunk.last:
                    self.ended.add(chunk.attempt)
            self.ended.update(finished.attempt for finished in output.finished)
            self._changed.notify_all()

    def submit(self, attempt: int, mode: Mode, prompt: list[int]) -> AttemptId:
        name = AttemptId(attempt)
        self.engine.submit(Work(name, mode, array("I", prompt), len(prompt), PARAMS, 0))
        return name

    def wait(self, attempts: set[AttemptId], *, reserved: bool = False) -> None:
        with self._changed:
            assert self._changed.wait_for(
                lambda: attempts <= (set(self.reserved) if reserved else self.ended), timeout=30
            )


@pytest.fixture
def engines(directory: Path) -> Iterator[tuple[Heard, Heard]]:
    pair = (Heard(directory), Heard(directory))
    yield pair
    for heard in pair:
        heard.engine.stop()
        assert heard.engine.died is None
        states = heard.engine.block_states()
        assert states.conserved
        assert states.used == states.leased == 0


def test_local_requests_and_their_repeats_equal_generate(
    engines: tuple[Heard, Heard], directory: Path
) -> None:
    heard, _ = engines
    for first in (0, 100):  # the second time, prefixes are cached
        attempts = {heard.submit(first + i, Mode.LOCAL, prompt) for i, prompt in enumerate(prompts())}
        heard.wait(attempts)
        for i, prompt in enumerate(prompts()):
            assert heard.tokens[AttemptId(first + i)] == expected(directory, prompt, NEW)
    assert heard.engine.counters.prompt_tokens_cached > 0


def test_handed_off_requests_equal_generate(engines: tuple[Heard, Heard], directory: Path) -> None:
    prefill, decode = engines
    assert prefill.engine.layout == decode.engine.layout
    attempts = set()
    for i, prompt in enumerate(prompts()):
        attempts.add(prefill.submit(i, Mode.PREFILL, prompt))
        decode.submit(i, Mode.DECODE, prompt)
    prefill.wait(attempts)
    decode.wait(attempts, reserved=True)
    for attempt in attempts:
        sources = [block for chunk in prefill.chunks[attempt] for block in chunk.blocks]
        for source, target in zip(sources, decode.reserved[attempt].blocks, strict=True):
            decode.engine.memory.owner[target].copy_(prefill.engine.memory.owner[source])  # type: ignore[index]
        prefill.engine.release(attempt)
        decode.engine.kv_arrived(attempt, prefill.tokens[attempt][0])
    decode.wait(attempts)
    for i, prompt in enumerate(prompts()):
        tokens = prefill.tokens[AttemptId(i)] + decode.tokens[AttemptId(i)]
        assert tokens == expected(directory, prompt, NEW)
    prefill.submit(99, Mode.LOCAL, prompts()[0])  # one more step each, so that the last output is of now
    decode.submit(99, Mode.LOCAL, prompts()[0])
    prefill.wait({AttemptId(99)})
    decode.wait({AttemptId(99)})
