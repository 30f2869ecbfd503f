"""Moves that fail, in every state and on every side: the request goes on at its source, or where the
frontend resumes it; nothing is drawn twice and nothing stays held."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from serving.engine.base import AttemptId
from serving.engine.live_sequence import Stage
from serving.wire import Confirmed, Ready, Renew
from tests.unit.handoff_fakes import until
from tests.unit.migration_rig import Rig, held, prompt
from tests.unit.migration_states import (
    ATTACHED,
    POSITION,
    STATES,
    A,
    B,
    C,
    Reach,
    by_name,
    confirming,
    copied,
    copying,
    goes_on_at_source,
    owner_link,
    paused,
    reader_link,
    stage,
    stopping,
    waiting,
)


@pytest.mark.parametrize("reach", STATES, ids=by_name)
async def test_target_cancelled(reach: Reach) -> None:
    async with Rig() as rig:
        source, target = rig.workers
        flow = await reach(rig)
        rig.cancel(target, B)
        await until(lambda: B not in target.host.reader._jobs)
        await until(lambda: source.host.moves.idle)
        flow()
        await goes_on_at_source(rig, 120 if reach is waiting else 20)
        assert B not in rig.frontend.ended
        assert target.came == {"cancelled": 1}
        assert source.out == ({} if reach is waiting else {"detached": 1})


@pytest.mark.parametrize("reach", ATTACHED, ids=by_name)
async def test_link_between_them_lost(reach: Reach) -> None:
    async with Rig() as rig:
        source, target = rig.workers
        flow = await reach(rig)
        target.cut_peers()
        await rig.ends(B)
        await until(lambda: source.host.moves.idle)
        flow()
        assert rig.frontend.ended[B][0].retryable
        await goes_on_at_source(rig)
        assert source.out == {"reader_lost": 1}
        assert target.came == {"failed": 1}


@pytest.mark.parametrize("reach", STATES, ids=by_name)
async def test_source_cancelled(reach: Reach) -> None:
    """The frontend gives up the whole request; the target hears it from the source, or from nobody."""
    async with Rig() as rig:
        source = rig.workers[0]
        flow = await reach(rig)
        rig.cancel(source, A)
        await until(lambda: not source.host.attempts)
        flow()
        await rig.ends(B)
        assert rig.frontend.ended[B][0].retryable
        assert A not in rig.frontend.ended
        assert rig.frontend.count(A) <= POSITION + 2
        assert rig.frontend.count(B) == 0
        source.grant(None)


@pytest.mark.parametrize("reach", ATTACHED, ids=by_name)
async def test_both_cancelled(reach: Reach) -> None:
    async with Rig() as rig:
        source, target = rig.workers
        flow = await reach(rig)
        rig.cancel(target, B)
        rig.cancel(source, A)
        await until(lambda: not source.host.attempts and not target.host.attempts)
        flow()
        await rig.is_free()
        assert not {A, B} & set(rig.frontend.ended)


@pytest.mark.parametrize("reach", ATTACHED, ids=by_name)
async def test_source_fails(reach: Reach) -> None:
    async with Rig() as rig:
        source = rig.workers[0]
        flow = await reach(rig)
        source.engine._post(lambda: source.engine._scheduler.fail_all("broken"))
        await rig.ends(A)
        flow()
        await rig.ends(B)
        assert rig.frontend.outcome(A) == rig.frontend.outcome(B) == "error"
        assert source.out == {"failed": 1}


@pytest.mark.parametrize("reach", [copying, copied], ids=by_name)
async def test_source_finishes_first(reach: Reach) -> None:
    """The target ends in silence: the source has told the end."""
    async with Rig() as rig:
        source, target = rig.workers
        flow = await reach_with_room(rig, reach)
        await goes_on_at_source(rig)
        await until(lambda: B not in target.host.reader._jobs)
        flow()
        assert B not in rig.frontend.ended
        assert (source.out, target.came) == ({"finished": 1}, {"unneeded": 1})


async def reach_with_room(rig: Rig, reach: Reach) -> Callable[[], None]:
    move = rig.move
    rig.move = lambda *args, **kwargs: move(*args, **kwargs, reserve_tokens=100)  # type: ignore[method-assign]
    return await reach(rig)


@pytest.mark.parametrize("reach", [copying, copied, stopping], ids=by_name)
async def test_preempted_meanwhile(reach: Reach) -> None:
    """Its blocks are taken from it: there is nothing left to hand over. It computes again, here."""
    async with Rig() as rig:
        source = rig.workers[0]
        flow = await reach(rig)
        scheduler = source.engine._scheduler
        source.engine._post(lambda: scheduler._preempt(scheduler._live[AttemptId(A)]))
        await until(lambda: stage(source) is Stage.PREFILL)
        flow()
        await rig.ends(B)
        assert rig.frontend.outcome(B) == "error"
        assert rig.frontend.ended[B][0].retryable
        await goes_on_at_source(rig)
        assert source.out == {"refused": 1}


@pytest.mark.parametrize("reach", [paused, confirming], ids=by_name)
async def test_pause_has_an_end(reach: Reach) -> None:
    """The target says nothing: after the longest pause the source goes on, and a late word is refused."""
    async with Rig() as rig:
        source = rig.workers[0]
        source.host.moves._pause_s = 0.2
        flow = await reach(rig)
        await until(lambda: source.out.get("expired"))
        source.grant(3)
        await until(lambda: rig.frontend.count(A) == POSITION + 3)
        flow()
        await rig.ends(B)
        assert rig.frontend.ended[B][0].retryable
        await goes_on_at_source(rig)
        assert source.host.metrics.migration_pause.count == 1


async def test_silent_reader_is_given_up() -> None:
    """Before the pause the lease is the limit; renewals prolong it."""
    async with Rig() as rig:
        source, target = rig.workers
        source.host.moves._lease_s = 0.2
        await copying(rig)
        held(reader_link(target), (Ready, Renew))
        target.local.faults.hang = False
        await until(lambda: source.out.get("expired"))
        await rig.ends(B)
        await goes_on_at_source(rig)


@pytest.mark.parametrize("n_failing", [1, 2], ids=["copy", "rest"])
async def test_read_that_cannot_be_posted(n_failing: int) -> None:
    async with Rig() as rig:
        source, target = rig.workers
        flow = await copied(rig) if n_failing == 2 else None
        if flow is None:
            await rig.connect(source, target)
            await rig.stands_at(source, A, prompt(20), POSITION)
        target.local.faults.failing_posts = 1
        if flow is None:
            rig.move(source, A, target, B)
        else:
            flow()
        await rig.ends(B)
        assert "not posted" in (rig.frontend.ended[B][0].error or "")
        await goes_on_at_source(rig)


async def test_confirmed_is_lost_with_its_link() -> None:
    """The one case in which neither goes on: the source left it, the target never heard so."""
    async with Rig() as rig:
        source, target = rig.workers
        flow = await confirming(rig)
        held(owner_link(source), (Confirmed,))
        flow()
        await rig.ends(A)
        target.cut_peers()
        await rig.ends(B)
        assert rig.frontend.outcome(A) == "moved"
        assert rig.frontend.ended[B][0].retryable
        rig.start(target, C, prompt(20))  # as a resume would
        target.grant(None)
        await rig.ends(C)


async def test_tried_again_after_a_failure() -> None:
    """What the first try left behind cannot be taken for the second's."""
    async with Rig(3) as rig:
        source, target, other = rig.workers
        flow = await stopping(rig)
        flow()  # the pause is on its way to the engine; so is the target's end
        rig.cancel(target, B)
        rig.move(source, A, other, C)
        await rig.ends(A, C)
        if rig.frontend.outcome(A) == "moved":
            assert rig.frontend.stream(A, C) == await rig.reference(prompt(20))
        else:
            await goes_on_at_source(rig)


async def test_frontend_of_the_source_is_lost() -> None:
    async with Rig() as rig:
        source = rig.workers[0]
        flow = await paused(rig)
        rig.links[source].close("gone")
        await until(lambda: not source.host.attempts)
        flow()
        await rig.ends(B)
        assert rig.frontend.ended[B][0].retryable
