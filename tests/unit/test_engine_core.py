"""serving.engine.core: the thread around scheduler and runner."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kvrouter.deadline import Order
from serving.config import EngineConfig
from serving.engine.base import AttemptId, BlockStates, EngineDied, Mode, StepOutput, StoredRun
from serving.engine.core import EngineCore
from serving.engine.pacing import DecodeGrid
from serving.engine.sequence import Drawn, StepPlan
from tests.engine_rig import CheckingRunner, Told, continuation, prompt, work

LIMIT_S = 10.0


class Listener:
    """Collects outputs; `wait_for` blocks until what was told satisfies a condition."""

    def __init__(self) -> None:
        self.told = Told()
        self.outputs: list[StepOutput] = []
        self._changed = threading.Condition()

    def __call__(self, output: StepOutput) -> None:
        with self._changed:
            self.told.add(output)
            self.outputs.append(output)
            self._changed.notify_all()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, LIMIT_S), "not told in time"

    @property
    def blocks(self) -> BlockStates:
        return self.outputs[-1].load.blocks


class GatedRunner(CheckingRunner):
    """A runner whose steps wait for `gate`, and raise what `error` holds."""

    def __init__(self, n_blocks: int = 64) -> None:
        super().__init__(n_blocks, 8)
        self.gate = threading.Event()
        self.gate.set()
        self.running = threading.Event()
        self.error: Exception | None = None

    def run(self, plan: StepPlan) -> Drawn:
        self.running.set()
        assert self.gate.wait(LIMIT_S)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return super().run(plan)


@contextmanager
def running(
    runner: CheckingRunner, *, decode_period_s: float | None = None, order: Order = Order.DEADLINE
) -> Iterator[tuple[EngineCore, Listener]]:
    config = EngineConfig(block_tokens=8, chunk_tokens=64, max_batch=8)
    engine = EngineCore(runner, config, decode_period_s=decode_period_s, order=order)
    listener = Listener()
    engine.start(listener)
    try:
        yield engine, listener
    finally:
        engine.stop()
        assert engine.died is None


def test_answers_from_a_thread() -> None:
    with running(GatedRunner()) as (engine, heard):
        for i in range(20):
            engine.submit(work(i, prompt(10 + i, salt=i), max_tokens=12))
        heard.wait_for(lambda: len(heard.told.finished) == 20)
        for i in range(20):
            assert heard.told.tokens[i] == continuation(prompt(10 + i, salt=i), 12)
        assert engine.counters.tokens_generated == 240
        assert engine.counters.steps == heard.outputs[-1].load.step
        states = engine.block_states()
        assert states.conserved
        assert states.used == states.leased == 0
        assert not heard.outputs[-1].load.runnable


@pytest.mark.parametrize(("order", "expected"), [(Order.DEADLINE, [2, 1]), (Order.FIFO, [1, 2])])
def test_a_short_prompt_that_comes_during_a_step(order: Order, expected: list[int]) -> None:
    runner = GatedRunner(n_blocks=200)
    runner.gate.clear()
    with running(runner, order=order) as (engine, heard):
        # Its priority gives the short one more than the moment by which it is late on a busy machine.
        engine.submit(work(1, prompt(1000), Mode.PREFILL, max_tokens=9))
        assert runner.running.wait(LIMIT_S)
        engine.submit(work(2, prompt(20, salt=2), Mode.PREFILL, max_tokens=9, priority=1))
        runner.gate.set()
        heard.wait_for(lambda: len(heard.told.tokens) == 2)
        assert list(heard.told.tokens) == expected
        assert heard.outputs[-1].load.waiting_tokens == 0


def test_verbs_before_start_wait() -> None:
    engine = EngineCore(GatedRunner(), EngineConfig(block_tokens=8))
    engine.submit(work(1, prompt(5)))
    heard = Listener()
    engine.start(heard)
    heard.wait_for(lambda: 1 in heard.told.finished)
    engine.stop()
    engine.stop()


def test_idle_costs_nothing() -> None:
    """Neither without work nor with work that cannot run (its KV is still on its way)."""
    with running(GatedRunner()) as (engine, heard):
        engine.submit(work(1, prompt(20), Mode.DECODE))
        heard.wait_for(lambda: 1 in heard.told.reserved)
        heard.wait_for(lambda: not heard.outputs[-1].load.runnable)
        n_outputs, cpu_s = len(heard.outputs), time.process_time()
        time.sleep(0.3)
        assert time.process_time() - cpu_s < 0.03
        assert len(heard.outputs) == n_outputs


def test_cancel_and_release_tell_the_new_block_states() -> None:
    with running(GatedRunner()) as (engine, heard):
        engine.submit(work(1, prompt(20), Mode.PREFILL))
        heard.wait_for(lambda: bool(heard.outputs) and heard.blocks.leased == 3)
        engine.release(AttemptId(1))
        heard.wait_for(lambda: heard.blocks.leased == 0)
        engine.submit(work(2, prompt(20, salt=1), Mode.DECODE))
        heard.wait_for(lambda: heard.blocks.used == 3)
        engine.cancel(AttemptId(2), quarantine=True)
        heard.wait_for(lambda: heard.blocks.quarantined == 3)
        engine.end_quarantine(AttemptId(2))
        heard.wait_for(lambda: heard.blocks.quarantined == 0)


def test_cancel_during_a_step() -> None:
    runner = GatedRunner()
    runner.gate.clear()
    with running(runner) as (engine, heard):
        engine.submit(work(1, prompt(20), max_tokens=1000))
        assert runner.running.wait(LIMIT_S)
        engine.cancel(AttemptId(1))
        engine.cancel(AttemptId(1))
        runner.gate.set()
        heard.wait_for(lambda: bool(heard.outputs) and heard.blocks.used == 0)
        assert 1 not in heard.told.finished


def test_hand_over_between_threads() -> None:
    runner = CheckingRunner(64, 8)
    with running(runner) as (source, told), running(runner) as (target, heard):
        # One memory for both: what prefill wrote is copied where decode reserved.
        target.submit(work(1, prompt(200, salt=3)))
        heard.wait_for(lambda: 1 in heard.told.finished)
        source.submit(work(2, prompt(20), Mode.PREFILL, max_tokens=9))
        target.submit(work(2, prompt(20), Mode.DECODE, max_tokens=9))
        told.wait_for(lambda: bool(told.told.chunks.get(2)))
        heard.wait_for(lambda: 2 in heard.told.reserved)
        chunk = told.told.chunks[2][-1]
        runner.copy(runner, list(zip(chunk.blocks, heard.told.reserved[2].blocks, strict=True)))
        assert chunk.token is not None
        target.kv_arrived(AttemptId(2), chunk.token)
        heard.wait_for(lambda: 2 in heard.told.finished)
        assert told.told.tokens[2] + heard.told.tokens[2] == continuation(prompt(20), 9)


def test_wrong_kv_fails_the_attempt() -> None:
    runner = GatedRunner()
    runner.refuse = "block 3 is not ours"
    with running(runner) as (engine, heard):
        engine.submit(work(1, prompt(20), Mode.DECODE))
        heard.wait_for(lambda: 1 in heard.told.reserved)
        engine.kv_arrived(AttemptId(1), 5)
        heard.wait_for(lambda: 1 in heard.told.failed)
        assert "block 3 is not ours" in heard.told.failed[1].message
        heard.wait_for(lambda: heard.blocks.free == heard.blocks.total)


def test_runner_raises_and_the_thread_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    runner = GatedRunner()
    with running(runner) as (engine, heard):
        runner.gate.clear()
        engine.submit(work(1, prompt(20)))
        assert runner.running.wait(LIMIT_S)
        engine.submit(work(2, prompt(20)))
        runner.error = RuntimeError("out of memory")
        runner.gate.set()
        heard.wait_for(lambda: 1 in heard.told.failed)
        heard.wait_for(lambda: 2 in heard.told.finished)
        assert "out of memory" in heard.told.failed[1].message
        assert engine.step_failures == 1
        assert engine.last_error == "RuntimeError('out of memory')"
        assert heard.blocks.used == 0


def test_a_listener_that_raises_ends_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    engine = EngineCore(GatedRunner(), EngineConfig(block_tokens=8))
    failed = threading.Event()

    def broken(output: StepOutput) -> None:
        if output.failed:
            failed.set()
        else:
            raise KeyError("no such client")

    engine.start(broken)
    engine.submit(work(1, prompt(5), max_tokens=50))
    assert failed.wait(LIMIT_S)  # the live attempt is told even so
    engine.stop()
    assert isinstance(engine.died, KeyError)
    with pytest.raises(EngineDied, match="no such client"):
        engine.submit(work(2, prompt(5)))
    engine.cancel(AttemptId(1))


def test_snapshot_stands_between_two_outputs() -> None:
    """Snapshot plus later events is what the engine knows at the end."""
    with running(GatedRunner(n_blocks=24)) as (engine, heard):
        known: set[int] = set()
        seen_at: list[int] = []
        done = threading.Event()

        def take(runs: list[StoredRun]) -> None:
            known.update(name for run in runs for name in run.hashes)
            seen_at.append(len(heard.outputs))
            done.set()

        for i in range(30):
            engine.submit(work(i, prompt(20 + i, salt=i % 7), max_tokens=6))
            if i == 15:
                engine.request_snapshot(take)
        heard.wait_for(lambda: len(heard.told.finished) == 30)
        assert done.wait(LIMIT_S)
        events = set(known)
        for output in heard.outputs[seen_at[0] :]:
            events -= set(output.removed)
            events |= {name for run in output.stored for name in run.hashes}
        done.clear()
        known.clear()
        engine.request_snapshot(take)
        assert done.wait(LIMIT_S)
        assert events == known


def test_a_blocked_engine_is_not_runnable_for_its_watchers() -> None:
    """Beats say `runnable`; an engine that waits for leases to end must not look hung."""
    with running(GatedRunner(n_blocks=6)) as (engine, heard):
        engine.submit(work(1, prompt(40), Mode.PREFILL))
        heard.wait_for(lambda: 1 in heard.told.chunks)
        engine.submit(work(2, prompt(30, salt=1)))
        heard.wait_for(lambda: heard.outputs[-1].load.waiting == 1 and not heard.outputs[-1].load.runnable)
        engine.release(AttemptId(1))
        heard.wait_for(lambda: 2 in heard.told.finished)


# ---------------------------------------------------------------- paced decode


def test_grid_keeps_its_places() -> None:
    grid = DecodeGrid(0.010)
    assert grid.due_s(1.003) == pytest.approx(1.010)
    assert grid.due_s(1.049) == pytest.approx(1.010)  # late: due since then
    grid.advance()
    assert grid.due_s(1.049) == pytest.approx(1.020)
    grid.reset()
    assert grid.due_s(2.001) == pytest.approx(2.010)


def test_paced_decodes_start_on_the_grid() -> None:
    period_s = 0.02
    with running(CheckingRunner(64, 8), decode_period_s=period_s) as (engine, heard):
        times: list[float] = []

        def timed(output: StepOutput) -> None:
            if output.tokens:
                times.append(time.monotonic())
            heard(output)

        engine._on_step = timed
        engine.submit(work(1, prompt(5), max_tokens=6))
        heard.wait_for(lambda: 1 in heard.told.finished)
        slots = [at / period_s for at in times[1:]]
        assert all(at >= int(slots[0]) + i for i, at in enumerate(slots))  # never early
        assert times[-1] - times[1] >= 3.5 * period_s


def test_a_new_prompt_does_not_wait_for_the_grid() -> None:
    with running(CheckingRunner(64, 8), decode_period_s=3600.0) as (engine, heard):
        engine.submit(work(1, prompt(5), max_tokens=6))
        heard.wait_for(lambda: 1 in heard.told.tokens)
        engine.submit(work(2, prompt(7, salt=2), max_tokens=6))
        heard.wait_for(lambda: 2 in heard.told.tokens)
        assert [len(heard.told.tokens[i]) for i in (1, 2)] == [1, 1]
        cpu_s = time.process_time()
        time.sleep(0.2)
        assert time.process_time() - cpu_s < 0.02  # and waiting for it is no busy loop
