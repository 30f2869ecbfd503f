"""serving.engine.sim: tokens that follow from the request alone, real bytes, times from a profile."""

from __future__ import annotations

import ctypes
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from serving.config import EngineConfig, SimProfile
from serving.engine.base import (
    AttemptId,
    BlockId,
    ChunkReady,
    KVMemory,
    Mode,
    Reserved,
    SamplingParams,
    StepOutput,
    Work,
)
from serving.engine.core import EngineCore
from serving.engine.sim import build_sim_engine
from serving.errors import ConfigError
from tests.engine_rig import Told, prompt

IDS = range(10, 500)
EOS = frozenset({2, 77})
LIMIT_S = 10.0


class SimRig:
    def __init__(self, engine: EngineCore) -> None:
        self.engine = engine
        self.told = Told()
        self.logprobs: dict[int, list[float]] = {}
        self._changed = threading.Condition()

    def heard(self, output: StepOutput) -> None:
        with self._changed:
            self.told.add(output)
            for row, drawn in output.logprobs.items():
                assert drawn.token == output.tokens[row]
                assert drawn.top == sorted(drawn.top, key=lambda pair: -pair[1])
                self.logprobs.setdefault(output.attempts[row], []).append(len(drawn.top))
            self._changed.notify_all()

    def ask(
        self,
        attempt: int,
        tokens: array[int],
        mode: Mode = Mode.LOCAL,
        n_prompt: int | None = None,
        **params: object,
    ) -> None:
        sampling = SamplingParams(**{"max_tokens": 20, "seed": 5, **params})  # type: ignore[arg-type]
        self.engine.submit(Work(AttemptId(attempt), mode, tokens, n_prompt or len(tokens), sampling, 7))

    def tokens(self, attempt: int) -> list[int]:
        """Of `attempt`, once it ended."""
        with self._changed:
            assert self._changed.wait_for(lambda: attempt in self.told.finished, LIMIT_S)
            return self.told.tokens[attempt]

    def chunk(self, attempt: int) -> ChunkReady:
        """The only chunk of `attempt`."""
        with self._changed:
            assert self._changed.wait_for(lambda: attempt in self.told.chunks, LIMIT_S)
            return self.told.chunks[attempt][-1]

    def reserved(self, attempt: int) -> Reserved:
        with self._changed:
            assert self._changed.wait_for(lambda: attempt in self.told.reserved, LIMIT_S)
            return self.told.reserved[attempt]

    def failed(self, attempt: int) -> str:
        with self._changed:
            assert self._changed.wait_for(lambda: attempt in self.told.failed, LIMIT_S)
            return self.told.failed[attempt].message


@contextmanager
def sim(profile: SimProfile | None = None, *, kv_bytes: int = 1 << 17) -> Iterator[SimRig]:
    profile = profile or SimProfile()
    config = EngineConfig(kind="sim", block_tokens=8, kv_bytes=kv_bytes, chunk_tokens=256, profile=profile)
    engine = build_sim_engine(config, profile, IDS, EOS, "tiny")
    rig = SimRig(engine)
    engine.start(rig.heard)
    try:
        yield rig
    finally:
        engine.stop()
        assert engine.died is None


def copy_blocks(source: KVMemory, theirs: list[BlockId], target: KVMemory, ours: list[BlockId]) -> None:
    """What the transfer does."""
    for b, a in zip(theirs, ours, strict=True):
        size = source.block_bytes
        ctypes.memmove(target.address + a * size, source.address + b * size, size)


def test_tokens_follow_from_the_request_alone() -> None:
    with sim() as one, sim() as other:
        one.ask(1, prompt(30))
        other.ask(8, prompt(3, salt=3))
        other.ask(9, prompt(30))
        assert one.tokens(1) == other.tokens(9) != other.tokens(8)
        assert set(one.tokens(1)) <= set(IDS) - EOS
        assert len(set(one.tokens(1))) > 10


def test_seed_matters_when_sampling_only() -> None:
    with sim() as rig:
        for attempt, (seed, temperature) in enumerate([(1, 1.0), (1, 1.0), (2, 1.0), (1, 0.0), (2, 0.0)]):
            rig.ask(attempt, prompt(30), seed=seed, temperature=temperature)
        answers = [rig.tokens(attempt) for attempt in range(5)]
        assert answers[0] == answers[1] != answers[2]
        assert answers[3] == answers[4] != answers[0]


@pytest.mark.parametrize("cut", [1, 7, 19])
def test_resume_goes_on_with_the_same_stream(cut: int) -> None:
    with sim() as rig:
        rig.ask(1, prompt(30))
        whole = rig.tokens(1)
        rig.ask(2, prompt(30) + array("I", whole[:cut]), n_prompt=30)
        assert rig.tokens(2) == whole[cut:]
        assert rig.told.first[2] == cut


@pytest.mark.parametrize("kv_bytes_per_token", [8, 64, 100])
@pytest.mark.parametrize("n_tokens", [5, 32, 50])
def test_hand_over_equals_local_and_is_checked(n_tokens: int, kv_bytes_per_token: int) -> None:
    profile = SimProfile(kv_bytes_per_token=kv_bytes_per_token)
    with sim(profile) as source, sim(profile) as target:
        assert source.engine.layout == target.engine.layout
        source.ask(1, prompt(n_tokens), Mode.PREFILL)
        target.ask(9, prompt(20, salt=9))
        target.tokens(9)
        target.ask(1, prompt(n_tokens), Mode.DECODE)
        chunk, ours = source.chunk(1), target.reserved(1)
        copy_blocks(source.engine.memory, list(chunk.blocks), target.engine.memory, list(ours.blocks))
        assert chunk.token is not None
        target.engine.kv_arrived(AttemptId(1), chunk.token)
        tokens = source.told.tokens[1] + target.tokens(1)
        assert target.engine.counters.content_checks == len(ours.blocks)
        assert target.engine.counters.content_errors == 0
        source.ask(2, prompt(n_tokens))
        assert source.tokens(2) == tokens


@pytest.mark.parametrize("fault", ["missing", "swapped", "stale"])
def test_wrong_bytes_are_found(fault: str) -> None:
    with sim() as source, sim() as target:
        source.ask(1, prompt(40), Mode.PREFILL)
        source.ask(2, prompt(40, salt=2), Mode.PREFILL)
        target.ask(1, prompt(40), Mode.DECODE)
        theirs, ours = list(source.chunk(1).blocks), list(target.reserved(1).blocks)
        if fault == "missing":
            theirs, some = theirs[:-1], ours[:-1]
        elif fault == "swapped":
            theirs[1], theirs[2], some = theirs[2], theirs[1], ours
        else:
            theirs[3], some = source.chunk(2).blocks[3], ours
        copy_blocks(source.engine.memory, theirs, target.engine.memory, some)
        target.engine.kv_arrived(AttemptId(1), 10)
        assert "hold other bytes" in target.failed(1)
        assert target.engine.counters.content_errors == (2 if fault == "swapped" else 1)


def test_layout_names_what_the_bytes_mean() -> None:
    with sim() as one, sim(SimProfile(kv_bytes_per_token=72)) as other:
        assert one.engine.layout != other.engine.layout


def test_logprobs_when_asked() -> None:
    with sim() as rig:
        rig.ask(1, prompt(9), logprobs=3, max_tokens=4)
        rig.ask(2, prompt(9), logprobs=0, max_tokens=4)
        rig.ask(3, prompt(9), max_tokens=4)
        assert rig.tokens(1) == rig.tokens(2) == rig.tokens(3)
        assert rig.logprobs == {1: [3, 3, 3, 3], 2: [0, 0, 0, 0]}


def test_min_tokens_with_a_stop_token() -> None:
    with sim() as rig:
        rig.ask(1, prompt(9))
        stop = rig.tokens(1)[4]
        rig.ask(2, prompt(9), stop_token_ids=(stop,))
        assert len(rig.tokens(2)) == rig.tokens(1).index(stop) + 1
        rig.ask(3, prompt(9), stop_token_ids=(stop,), min_tokens=10)
        assert len(rig.tokens(3)) >= 10
        assert stop not in rig.tokens(3)[:10]


def test_times_come_from_the_profile() -> None:
    profile = SimProfile(step_ms=2, step_ms_per_sequence=1, prefill_ms_per_token=0.5)
    with sim(profile) as rig:
        began_s = time.monotonic()
        rig.ask(1, prompt(40), max_tokens=6)
        rig.tokens(1)
        took_ms = (time.monotonic() - began_s) * 1e3
        assert took_ms >= (2 + 1 + 40 * 0.5) + 5 * (2 + 1)
        counters = rig.engine.counters
        assert counters.prefill_seconds >= 0.023
        assert counters.decode_seconds >= 0.015


def test_small_pool_ends_all_the_same() -> None:
    """Preemption under the simulated model: same tokens as alone."""
    with sim() as alone, sim(kv_bytes=8 * 64 * 12) as rig:
        for attempt in range(8):
            rig.ask(attempt, prompt(20, salt=attempt), max_tokens=60)
            alone.ask(attempt, prompt(20, salt=attempt), max_tokens=60)
        for attempt in range(8):
            assert rig.tokens(attempt) == alone.tokens(attempt)
        assert rig.engine.counters.preemptions > 0
        states = rig.engine.block_states()
        assert states.cached + states.free == states.total


@pytest.mark.parametrize(
    ("kv_bytes", "ids", "message"),
    [
        pytest.param(100, IDS, "kv_bytes = 100; allowed: one block", id="no_block"),
        pytest.param(1 << 17, EOS, "holds EOS ids only", id="nothing_to_draw"),
    ],
)
def test_bad_settings(kv_bytes: int, ids: range | frozenset[int], message: str) -> None:
    config = EngineConfig(kind="sim", kv_bytes=kv_bytes, block_tokens=8)
    with pytest.raises(ConfigError, match=message):
        build_sim_engine(config, SimProfile(), list(ids), EOS, "tiny")
