"""A frontend's links to its workers: membership, strangers, hung engines, and what each does to streams."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from serving import kept_link
from serving.engine.base import FinishReason
from serving.errors import NoWorker, Unavailable, WorkerLost
from serving.link import Link
from serving.run import Stage
from serving.variant_links import EMPTY_LIST_S
from serving.wire import (
    Beat,
    Begun,
    Cancel,
    Draining,
    Ended,
    LoadReport,
    Peers,
    SnapshotRequest,
    Step,
    unpack_u32,
)
from tests.unit.handoff_fakes import until
from tests.unit.links_rig import LONG_S, SILENCE_S, Rig


@pytest.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr(kept_link, "LAST_RETRY_S", kept_link.FIRST_RETRY_S)
    rig = Rig()
    yield rig
    await rig.stop()


# ---------------------------------------------------------------- membership


async def test_members_are_linked_and_asked_for_a_snapshot(rig: Rig) -> None:
    assert rig.links.pools() == {"prefill": 0, "decode": 0}
    prefill, decode = await rig.worker("p", "prefill"), await rig.worker("d")
    rig.members("d")
    rig.members("p", role="prefill")
    await rig.linked("p", "d")
    assert rig.links.pools() == {"prefill": 1, "decode": 1}
    await until(lambda: prefill.got(SnapshotRequest) and decode.got(SnapshotRequest), LONG_S)
    # Decode hears of prefill, whichever of the two came first; prefill needs nobody.
    await until(lambda: any(peers.peers for peers in decode.got(Peers)), LONG_S)
    (peer,) = decode.got(Peers)[-1].peers
    assert (peer.address, peer.ident, peer.epoch) == (prefill.address, "p", prefill.me.epoch)
    assert prefill.got(Peers) == []


async def test_a_member_that_is_not_ready_is_not_dialled(rig: Rig) -> None:
    await rig.worker("a")
    rig.links.update("decode", {"a": {}})
    assert rig.links._workers == {}
    rig.members("a")
    await rig.linked("a")


async def test_without_any_worker_a_request_is_refused(rig: Rig) -> None:
    with pytest.raises(NoWorker):
        rig.ask()


async def test_a_departed_worker_keeps_its_streams_and_gets_no_new_ones(rig: Rig) -> None:
    a, b = await rig.decoders("a", "b")
    run, sink = rig.ask()
    (attempt,) = run.attempts.values()
    busy, other = (a, b) if attempt.worker == "a" else (b, a)
    submit = await rig.asked(busy)
    busy.say(Step(begun=[Begun(submit.attempt, 0)]))
    await until(lambda: run.stage is Stage.PREFILL, LONG_S)
    rig.members(other.me.ident)
    assert {await rig.placed_on() for _ in range(20)} == {other.me.ident}
    rig.links.sweep()
    busy.answer(submit, 10, 11, 12, 13, ended="length")
    await until(lambda: sink.reason, LONG_S)
    assert sink.tokens == [10, 11, 12, 13]
    assert busy.lost == 0
    assert rig.links.pools()["decode"] == 1
    rig.links.sweep()
    await rig.gone(busy)
    assert busy.opened == 1


async def test_an_idle_worker_that_departs_loses_its_link_at_once(rig: Rig) -> None:
    a, b = await rig.decoders("a", "b")
    rig.members("b")
    await rig.gone(a)
    assert b.lost == 0
    assert rig.links.pools()["decode"] == 1


async def test_a_departed_worker_that_breaks_is_resumed_elsewhere_and_forgotten(rig: Rig) -> None:
    a, b = await rig.decoders("a", "b")
    run, _ = rig.ask()
    (attempt,) = run.attempts.values()
    busy, other = (a, b) if attempt.worker == "a" else (b, a)
    await rig.asked(busy)
    rig.members(other.me.ident)
    await busy.stop()
    await rig.asked(other)
    await rig.gone(busy)
    assert set(rig.links._workers) == {other.me.ident}
    run.cancel()


async def test_a_worker_that_departs_and_comes_back_is_placed_on_again(rig: Rig) -> None:
    a, b = await rig.decoders("a", "b")
    runs = [rig.ask()[0] for _ in range(2)]  # one each: both stay linked
    await rig.asked(a)
    await rig.asked(b)
    rig.members("b")
    assert {await rig.placed_on() for _ in range(20)} == {"b"}
    rig.members("a", "b")
    assert "a" in {await rig.placed_on() for _ in range(40)}
    assert a.opened == b.opened == 1
    for run in runs:
        run.cancel()


async def test_another_incarnation_under_the_same_name_replaces_the_first(rig: Rig) -> None:
    (a,) = await rig.decoders("a")
    await a.stop()
    again = await rig.worker("a")
    rig.members("a")
    await until(lambda: again.opened == 1, LONG_S)
    await rig.linked("a")
    assert rig.entries["a"].epoch == again.me.epoch
    await until(lambda: not rig.links._stopping, LONG_S)
    assert await rig.placed_on() == "a"


# ---------------------------------------------------------------- empty lists


async def test_an_empty_list_is_ignored_for_a_while(rig: Rig) -> None:
    (a,) = await rig.decoders("a")
    for _ in range(3):  # it may be said more than once
        rig.members()
        rig.links.sweep()
        assert await rig.placed_on() == "a"
        rig.now += EMPTY_LIST_S / 3
    rig.members("a")
    rig.now += EMPTY_LIST_S
    rig.links.sweep()
    assert await rig.placed_on() == "a"
    assert a.lost == 0


async def test_an_empty_list_that_stays_is_believed(rig: Rig) -> None:
    (a,) = await rig.decoders("a")
    run, sink = rig.ask()
    submit = await rig.asked(a)
    rig.members()
    rig.now += EMPTY_LIST_S + 1
    rig.links.sweep()
    assert rig.links.pools()["decode"] == 0
    a.answer(submit, 10, ended="stop")  # its stream goes on all the same
    await until(lambda: sink.reason, LONG_S)
    assert run.ended
    rig.links.sweep()
    await rig.gone(a)


async def test_an_empty_list_without_links_is_believed_at_once(rig: Rig) -> None:
    await rig.worker("a")
    await rig.workers["a"].stop()
    rig.members("a")
    rig.members()
    assert rig.links._workers == {}


async def test_the_pools_lists_do_not_mix(rig: Rig) -> None:
    await rig.worker("p", "prefill")
    await rig.worker("d")
    rig.members("d")
    rig.members("p", role="prefill")
    await rig.linked("p", "d")
    rig.members(role="prefill")
    rig.now += EMPTY_LIST_S + 1
    rig.links.sweep()
    assert rig.links.pools() == {"prefill": 0, "decode": 1}


# ---------------------------------------------------------------- links that break or lie


@pytest.mark.parametrize("wrong", ["ident", "epoch"])
async def test_a_stranger_at_a_workers_address_is_refused(rig: Rig, wrong: str) -> None:
    a = await rig.worker("a")
    name = "b" if wrong == "ident" else "a"
    meta = a.meta if wrong == "ident" else {**a.meta, "epoch": 5}
    rig.links.update("decode", {name: meta})
    await until(lambda: a.lost >= 2, LONG_S)  # tried again, refused again
    assert rig.entries == {}
    assert rig.links.pools() == {"prefill": 0, "decode": 0}
    assert a.messages == []
    with pytest.raises(NoWorker):
        rig.ask()


async def test_what_a_stranger_says_is_not_heard(rig: Rig) -> None:
    """Even what comes in one piece with its proof."""
    a = await rig.worker("a")
    a.on_open = lambda link: link.send(Step(ended=[Ended(1, "stop")]))  # type: ignore[method-assign]
    heard: list[Step] = []
    rig.coordinator.on_step = heard.append  # type: ignore[method-assign]
    rig.links.update("decode", {"b": a.meta})
    await until(lambda: a.lost >= 3, LONG_S)
    assert heard == []


async def test_a_worker_whose_link_breaks_and_comes_back_is_placed_on_again(rig: Rig) -> None:
    a, b = await rig.decoders("a", "b")
    run, sink = rig.ask()
    (attempt,) = run.attempts.values()
    first, other = (a, b) if attempt.worker == "a" else (b, a)
    submit = await rig.asked(first)
    first.answer(submit, 10, 11)
    await until(lambda: sink.tokens == [10, 11], LONG_S)
    assert first.link is not None
    first.link.close("a blip")
    again = await rig.asked(other)
    assert list(unpack_u32(again.tokens)) == [1, 2, 3, 10, 11]
    first.say(Step(ended=[Ended(submit.attempt, "stop")]))  # the old attempt is nobody's any more
    other.answer(again, 12, 13, ended="length")
    await until(lambda: sink.reason, LONG_S)
    assert (sink.tokens, sink.reason) == ([10, 11, 12, 13], FinishReason.LENGTH)
    await rig.linked("a", "b")
    assert {await rig.placed_on() for _ in range(40)} == {"a", "b"}
    assert first.opened == 2


async def test_the_only_worker_lost_ends_the_request_once_it_has_waited(rig: Rig) -> None:
    (a,) = await rig.decoders("a")
    run, sink = rig.ask()
    await rig.asked(a)
    await a.stop()
    await until(lambda: run.waits_after is not None, LONG_S)
    assert sink.error is None
    rig.now += 61  # deadlines.queue_ms
    rig.links.coordinator.sweep()
    assert isinstance(sink.error, WorkerLost)


async def test_stopping_ends_every_stream_and_dials_no_more(rig: Rig) -> None:
    a, b = await rig.decoders("a", "b")
    _, sink = rig.ask()
    await rig.links.stop()
    assert isinstance(sink.error, Unavailable)
    for worker in (a, b):
        await until(lambda worker=worker: worker.lost == worker.opened == 1, LONG_S)


async def test_a_worker_that_missed_its_beats_gets_nothing_new(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = await rig.decoders("a", "b")
    silent = {"a": 1.5}
    monkeypatch.setattr(Link, "silent_s", property(lambda link: silent.get(link.peer.ident, 0.0)))
    rig.links.sweep()
    for _ in range(4):
        rig.ask()
        await rig.asked(b)
    assert rig.links.pools()["decode"] == 2  # it is not given up: its link says when it is lost
    silent["a"] = 0.0
    rig.links.sweep()
    rig.ask()
    await rig.asked(a)


# ---------------------------------------------------------------- hung engines


async def beats(rig: Rig, ident: str, beat: Beat) -> None:
    """`beat` has arrived and was looked at."""
    rig.workers[ident].beat = beat
    kept = rig.links._workers[ident].kept
    assert kept is not None
    await until(lambda: kept.link is not None and kept.link.peer_beat == beat, LONG_S)
    rig.links.sweep()


async def test_a_hung_engine_loses_its_streams_to_others_until_it_moves(rig: Rig) -> None:
    a, b = await rig.decoders("a", "b")
    run, _ = rig.ask()
    (attempt,) = run.attempts.values()
    hung, other = (a, b) if attempt.worker == "a" else (b, a)
    name = hung.me.ident
    await rig.asked(hung)
    await beats(rig, name, Beat(7, runnable=True))
    rig.now += SILENCE_S - 0.1
    rig.links.sweep()
    assert hung.lost == 0
    rig.now += 0.2
    rig.links.sweep()
    await rig.asked(other)  # goes on there
    # It is linked again, for its loop is well; but its engine gets nothing until it moves.
    await until(lambda: hung.opened == 2, LONG_S)
    await beats(rig, name, Beat(7, runnable=True))
    rig.now += 10 * SILENCE_S
    rig.links.sweep()
    assert hung.opened == 2
    assert {await rig.placed_on() for _ in range(20)} == {other.me.ident}
    assert rig.links.pools()["decode"] == 1
    run.cancel()
    await beats(rig, name, Beat(8, runnable=True))
    assert rig.links.pools()["decode"] == 2
    assert {await rig.placed_on() for _ in range(40)} == {"a", "b"}


async def test_a_hung_worker_that_drains_gets_nothing_when_it_moves_again(rig: Rig) -> None:
    a, b = await rig.decoders("a", "b")
    await beats(rig, "a", Beat(7, runnable=True))
    rig.now += SILENCE_S + 1
    rig.links.sweep()
    await until(lambda: a.opened == 2, LONG_S)
    a.say(Draining(True))  # as a worker does first of all on a link
    await until(lambda: rig.links._workers["a"].draining, LONG_S)
    await beats(rig, "a", Beat(8, runnable=True))
    assert rig.links.pools()["decode"] == 1
    assert {await rig.placed_on() for _ in range(20)} == {b.me.ident}


@pytest.mark.parametrize("beat", [Beat(7), Beat(8, runnable=True)], ids=["idle", "moving"])
async def test_an_engine_that_is_idle_or_moves_is_not_hung(rig: Rig, beat: Beat) -> None:
    (a,) = await rig.decoders("a")
    await beats(rig, "a", Beat(7, runnable=True))
    rig.now += SILENCE_S - 1
    await beats(rig, "a", beat)
    rig.now += SILENCE_S - 1
    rig.links.sweep()
    assert a.lost == 0
    assert rig.links.pools()["decode"] == 1


async def test_load_reports_reach_the_router(rig: Rig) -> None:
    """The worker that other frontends keep busy is left alone."""
    a, _ = await rig.decoders("a", "b")
    a.say(Step(load=LoadReport(1, 9, 9, 9000, 10, 100, 5.0)))
    await until(lambda: rig.router.load_of("a")._report is not None, LONG_S)
    assert {await rig.placed_on() for _ in range(20)} == {"b"}


async def test_cancel_reaches_the_worker(rig: Rig) -> None:
    (a,) = await rig.decoders("a")
    run, _ = rig.ask()
    submit = await rig.asked(a)
    run.cancel()
    await until(lambda: a.got(Cancel), LONG_S)
    assert a.got(Cancel) == [Cancel(submit.attempt)]
