"""What a worker tells its frontends while it drains, and what it refuses to splice."""

from __future__ import annotations

import pytest

from serving.engine.base import Guided, SamplingParams
from serving.engine.core import EngineCore
from serving.engine.sim import CAPABILITIES
from serving.link import Identity, dial
from tests.unit.handoff_fakes import until
from tests.unit.migration_rig import Frontend, Rig, prompt

A, B = 1, 2


async def test_frontends_are_told_once_each() -> None:
    async with Rig() as rig:
        worker, other = rig.workers
        for _ in range(2):
            worker.host.drain()
        await until(lambda: rig.frontend.draining == [True])
        late = Frontend()
        link = await dial(worker.address, Identity.fresh("frontend", "late"), rig.key, late)
        await until(lambda: late.draining == [True])
        for _ in range(2):
            worker.host.undrain()
        await until(lambda: rig.frontend.draining == [True, False] and late.draining == [True, False])
        link.close("done")
        after = Frontend()
        link = await dial(worker.address, Identity.fresh("frontend", "after"), rig.key, after)
        other.host.drain()
        await until(lambda: rig.frontend.draining == [True, False, True])
        assert after.draining == []
        link.close("done")


async def test_a_frontend_of_the_older_wire_is_told_nothing() -> None:
    async with Rig() as rig:
        worker = rig.workers[0]
        old = Frontend()
        me = Identity.fresh("frontend", "old")
        link = await dial(worker.address, Identity(me.kind, me.ident, me.epoch, 1), rig.key, old)
        worker.host.drain()
        await until(lambda: rig.frontend.draining)
        assert not link.closed
        assert old.draining == []
        link.close("done")


async def test_nothing_is_refused_and_busy_says_when_it_is_over() -> None:
    async with Rig() as rig:
        source, target = rig.workers
        source.host.drain()
        assert not source.host.busy
        await rig.stands_at(source, A, prompt(20), 4)  # arrives all the same
        await until(lambda: source.host.busy)
        rig.move(source, A, target, B)
        await rig.ends(A, B)
        assert rig.frontend.outcome(A) == "moved"
        await until(lambda: not source.host.busy)


async def test_a_draining_worker_lets_end_what_nobody_moves() -> None:
    async with Rig() as rig:
        worker = rig.workers[0]
        await rig.stands_at(worker, A, prompt(20), 4)
        worker.host.drain()
        worker.grant(None)
        await rig.ends(A)
        assert rig.frontend.outcome(A) == "length"
        await until(lambda: not worker.host.busy)


@pytest.mark.parametrize("live", [False, True], ids=["resumed", "moved"])
async def test_migration_keeps_grammar(live: bool) -> None:
    """The engines that hand over live requests know no grammar: what has one is refused by the worker as it
    is by the door, so an answer is never continued without its grammar."""
    assert not CAPABILITIES.guided
    params = SamplingParams(max_tokens=40, seed=1, guided=Guided("json", "{}"))
    async with Rig() as rig:
        source, target = rig.workers
        assert isinstance(source.engine, EngineCore)
        assert not source.engine.capabilities.guided
        await rig.stands_at(source, A, prompt(20), 4)
        if live:
            rig.move(source, A, target, B, params=params)
        else:
            rig.start(target, B, prompt(24), params)
        await rig.ends(B)
        assert "guided" in (rig.frontend.ended[B][0].error or "")
        assert rig.frontend.count(B) == 0
