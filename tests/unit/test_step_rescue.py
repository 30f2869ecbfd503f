"""A step that raises: whoever broke it fails alone; an engine that is broken ends."""

from __future__ import annotations

import contextlib
import threading

import pytest

from serving.config import EngineConfig
from serving.engine.base import AttemptId, EngineDied
from serving.engine.core import LOST_STEPS, EngineCore
from serving.engine.sequence import Drawn, StepPlan
from tests.engine_rig import CheckingRunner, continuation, prompt, work
from tests.unit.test_engine_core import LIMIT_S, Listener


class Poisoned(CheckingRunner):
    """Raises whenever one of `poison` is in the plan from its given length on; counts its steps."""

    def __init__(self, poison: dict[int, int], n_blocks: int = 256) -> None:
        super().__init__(n_blocks, 8)
        self.poison = poison
        self.gate = threading.Event()
        self.steps = 0
        self.broken = False

    def run(self, plan: StepPlan) -> Drawn:
        assert self.gate.wait(LIMIT_S)
        self.steps += 1
        if self.broken:
            raise RuntimeError("the device is gone")
        for seq in plan.decodes + [piece.sequence for piece in plan.prefills]:
            if len(seq.tokens) >= self.poison.get(seq.work.attempt, 1 << 30):
                raise ValueError(f"a bad request: {seq.work.attempt}")
        return super().run(plan)


def serve(runner: Poisoned, attempts: int, max_tokens: int = 6) -> tuple[EngineCore, Listener]:
    engine = EngineCore(runner, EngineConfig(block_tokens=8, chunk_tokens=4096, max_batch=64))
    heard = Listener()
    engine.start(heard)
    for attempt in range(attempts):
        engine.submit(work(attempt, prompt(20, salt=attempt), max_tokens=max_tokens))
    runner.gate.set()
    return engine, heard


@pytest.mark.parametrize(
    "poison",
    [{3: 20}, {0: 22}, {15: 22}, {2: 20, 3: 23, 9: 24}, dict.fromkeys(range(1, 16), 22)],
    ids=["prompt", "first decode", "last decode", "several", "all but one"],
)
def test_only_the_guilty_fail_and_nobody_else_notices(
    poison: dict[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    engine, heard = serve(Poisoned(poison), 16)
    heard.wait_for(lambda: len(heard.told.finished) + len(heard.told.failed) == 16)
    assert set(heard.told.failed) == set(poison)
    for attempt in set(range(16)) - set(poison):
        assert heard.told.tokens[attempt] == continuation(prompt(20, salt=attempt), 6)
    for attempt, length in poison.items():
        failed = heard.told.failed[attempt]
        assert (failed.retryable, failed.in_step) == (True, True)
        assert len(heard.told.tokens.get(attempt, [])) == length - 20  # what came before stays
    heard.wait_for(lambda: heard.blocks.used == 0)
    assert engine.died is None
    engine.stop()


def test_one_bad_request_costs_few_steps(caplog: pytest.LogCaptureFixture) -> None:
    runner = Poisoned({7: 20})
    engine, heard = serve(runner, 32, max_tokens=1)
    heard.wait_for(lambda: len(heard.told.finished) + len(heard.told.failed) == 32)
    assert runner.steps <= 3 + 2 * 5 + 1  # 2 * log2(32), and the steps they came in
    engine.stop()


def test_a_step_that_failed_once_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    class Once(Poisoned):
        def run(self, plan: StepPlan) -> Drawn:
            assert self.gate.wait(LIMIT_S)
            if len(plan.decodes) > 2 and not self.broken:
                self.broken = True
                raise RuntimeError("out of memory")
            return CheckingRunner.run(self, plan)

    engine, heard = serve(Once({}), 8)
    heard.wait_for(lambda: len(heard.told.finished) == 8)
    assert heard.told.failed == {}
    assert engine.step_failures == 1
    engine.stop()


def two_at_once(engine: EngineCore, runner: Poisoned, heard: Listener, first: int) -> None:
    """A step with two requests in it, and its end."""
    runner.gate.clear()
    for attempt in (first, first + 1):
        engine.submit(work(attempt, prompt(20, salt=attempt)))
    runner.gate.set()
    heard.wait_for(lambda: {first, first + 1} <= set(heard.told.failed))


def test_an_engine_whose_steps_all_fail_ends(caplog: pytest.LogCaptureFixture) -> None:
    runner = Poisoned({})
    engine, heard = serve(runner, 0)
    runner.broken = True
    for turn in range(4 * LOST_STEPS):
        if engine.died is not None:
            break
        with contextlib.suppress(EngineDied):
            two_at_once(engine, runner, heard, 10 + 2 * turn)
    engine._thread.join(LIMIT_S)
    assert isinstance(engine.died, EngineDied)
    assert all(failed.retryable for failed in heard.told.failed.values())
    with pytest.raises(EngineDied, match="device is gone"):
        engine.submit(work(99, prompt(5)))
    engine.cancel(AttemptId(99))


def test_bad_requests_one_by_one_do_not_end_it(caplog: pytest.LogCaptureFixture) -> None:
    runner = Poisoned(dict.fromkeys(range(3 * LOST_STEPS), 20))
    engine, heard = serve(runner, 0)
    for attempt in range(3 * LOST_STEPS):
        engine.submit(work(attempt, prompt(20, salt=attempt)))
        heard.wait_for(lambda a=attempt: a in heard.told.failed)  # type: ignore[misc]
    engine.submit(work(100, prompt(20, salt=100)))
    heard.wait_for(lambda: 100 in heard.told.finished)
    assert engine.died is None
    engine.stop()
