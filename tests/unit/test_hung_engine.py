"""A worker whose engine hangs in a step ends soon after it is told to: it holds a GPU that others need."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from serving import worker_drain
from serving.engine import core
from serving.wire import Beat
from serving.worker_drain import QUIET_S, until_unneeded
from tests.unit.app_rig import LONG_S, App, prompt

SOON_S = 0.3


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "STOP_S", SOON_S)
    monkeypatch.setattr(worker_drain, "UNFIT_DRAIN_S", SOON_S)


async def test_a_worker_stops_although_its_step_never_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate, hangs = threading.Event(), threading.Event()
    async with App(prefill=0, decode=1, health={"canary_s": 0}) as app:
        (worker,) = app.workers
        engine: Any = worker.engine
        run = engine._runner.run

        def hang(plan: Any) -> Any:
            hangs.set()
            gate.wait(LONG_S)
            return run(plan)

        monkeypatch.setattr(engine._runner, "run", hang)
        asking = asyncio.create_task(app.client().complete(prompt=prompt(20), max_tokens=4))
        await asyncio.to_thread(hangs.wait, LONG_S)
        began_s = time.monotonic()
        await until_unneeded(worker.host, LONG_S)
        assert worker.host.busy
        await worker.host.stop()
        assert SOON_S <= time.monotonic() - began_s < LONG_S / 2
        assert "the engine hangs" in caplog.text
        gate.set()
        await asyncio.to_thread(engine._thread.join, LONG_S)
        asking.cancel()
        app.workers.remove(worker)
        await worker.control.stop()


class Scripted:
    """A worker that is as it is told to be."""

    def __init__(self, *, busy: bool, runnable: bool = False, steps: bool = False) -> None:
        self.busy = busy
        self._runnable = runnable
        self._steps = steps
        self._step = 0

    def beat(self) -> Beat:
        self._step += self._steps
        return Beat(self._step, self._runnable)


@pytest.mark.parametrize(
    ("worker", "at_least_s", "at_most_s"),
    [
        pytest.param(Scripted(busy=False), QUIET_S, 1.0, id="nobody_needs_it"),
        pytest.param(Scripted(busy=True, runnable=True, steps=True), 1.5, 3.0, id="it_works"),
        pytest.param(Scripted(busy=True), 1.5, 3.0, id="a_lease_waits_for_its_reader"),
        pytest.param(Scripted(busy=True, runnable=True), SOON_S, 1.4, id="it_hangs"),
    ],
)
async def test_how_long_a_leaving_worker_stays(
    worker: Scripted, at_least_s: float, at_most_s: float
) -> None:
    began_s = time.monotonic()
    await until_unneeded(worker, 1.5)
    assert at_least_s <= time.monotonic() - began_s < at_most_s
