"""Moves that fail, in every state and on every side: the request goes on at its source, or where the
frontend resumes it; nothing is drawn twice and nothing stays held."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from serving.config import Deadlines
from serving.engine.base import AttemptId, Mode
from serving.engine.live_sequence import Stage
from serving.kv.peer_link import PeerLink
from serving.wire import Chunk, Confirm, Confirmed, Detach, Handoff, Message, Ready, Renew
from tests.unit.handoff_fakes import until
from tests.unit.migration_rig import Rig, Worker, held, prompt

A, B, C = 1, 2, 3
POSITION = 4
Reach = Callable[[Rig], Awaitable[Callable[[], None]]]  # a state; what is returned lets things flow again


def stage(worker: Worker, attempt: int = A) -> Stage | None:
    seq = worker.engine._scheduler._live.get(AttemptId(attempt))
    return None if seq is None else seq.stage


def reader_link(worker: Worker) -> PeerLink:
    """On which `worker` reads."""
    (peer,) = worker.host.peers._peers.values()
    return peer.link


def owner_link(worker: Worker, attempt: int = A) -> PeerLink:
    """On which `worker` answers the reader of `attempt`."""
    return worker.host.moves._moves[AttemptId(attempt)].reader


async def waiting(rig: Rig) -> Callable[[], None]:
    """The target has no room yet."""
    source, target = rig.workers[:2]
    rig.start(target, 60, prompt(900, salt=60), mode=Mode.PREFILL)  # leased, as nobody reads it
    await until(lambda: rig.frontend.count(60) == 1)
    await rig.stands_at(source, A, prompt(120), POSITION)
    rig.move(source, A, target, B)
    await until(lambda: stage(target, B) is Stage.WAITING)
    return lambda: rig.cancel(target, 60)


async def copying(rig: Rig) -> Callable[[], None]:
    source, target = rig.workers[:2]
    await rig.connect(source, target)
    await rig.stands_at(source, A, prompt(20), POSITION)
    target.local.faults.hang = True
    rig.move(source, A, target, B)
    await until(lambda: target.local.busy)
    return lambda: setattr(target.local.faults, "hang", False)


async def copied(rig: Rig) -> Callable[[], None]:
    """All is read; that the target says so is held back."""
    source, target = rig.workers[:2]
    await rig.connect(source, target)
    await rig.stands_at(source, A, prompt(20), POSITION)
    let_go = held(reader_link(target), (Ready,))
    read = target.local.counters.reads
    rig.move(source, A, target, B)
    await until(lambda: target.local.counters.reads > read)
    return let_go


async def stopping(rig: Rig) -> Callable[[], None]:
    """The source has drawn two more tokens and is asked to pause, in the middle of a step."""
    source = rig.workers[0]
    let_go = await copied(rig)
    source.grant(2)
    await until(lambda: rig.frontend.count(A) == POSITION + 2)
    with pytest.MonkeyPatch.context() as patch:
        asked: list[AttemptId] = []
        patch.setattr(source.engine, "pause", asked.append)
        let_go()
        await until(lambda: asked)
    return lambda: source.engine.pause(AttemptId(A))


async def paused(rig: Rig) -> Callable[[], None]:
    """The last chunk is there, its read is not done."""
    source, target = rig.workers[:2]
    let_go = await copied(rig)
    target.local.faults.hang = True
    let_go()
    await until(lambda: stage(source) is Stage.PAUSED)
    await until(lambda: target.local.busy)
    return lambda: setattr(target.local.faults, "hang", False)


async def confirming(rig: Rig) -> Callable[[], None]:
    """All is read; the question for the confirmation is held back."""
    source, target = rig.workers[:2]
    await rig.connect(source, target)
    await rig.stands_at(source, A, prompt(20), POSITION)
    link = reader_link(target)
    asked: list[Message] = []
    let_go = held(link, (Confirm,), asked)
    rig.move(source, A, target, B)
    await until(lambda: asked)
    assert stage(source) is Stage.PAUSED

    def flow() -> None:
        if not link.closed:
            let_go()

    return flow


STATES: list[Reach] = [waiting, copying, copied, stopping, paused, confirming]
ATTACHED = STATES[1:]


def by_name(value: object) -> str:
    return getattr(value, "__name__", str(value))


async def goes_on_at_source(rig: Rig, n_prompt: int = 20) -> None:
    """All of the answer comes from the source, as if nothing had happened."""
    rig.workers[0].grant(None)
    await rig.ends(A)
    assert rig.frontend.outcome(A) == "length"
    assert rig.frontend.count(B) == 0
    assert rig.frontend.stream(A) == await rig.reference(prompt(n_prompt))


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


async def test_wrong_content_is_refused() -> None:
    """Sim compares every byte, those of the last block in part too; the target fails."""
    async with Rig() as rig:
        target = rig.workers[1]
        flow = await confirming(rig)
        seq = target.engine._scheduler._live[AttemptId(B)]
        slot = seq.blocks[2] * 8 + 6  # the last of 23 tokens that have KV
        assert target.engine._runner._words[slot] != 0  # type: ignore[attr-defined]
        target.engine._runner._words[slot] ^= 2  # type: ignore[attr-defined]
        flow()
        await rig.ends(A, B)
        assert "refused" in (rig.frontend.ended[B][0].error or "")
        assert rig.frontend.ended[B][0].retryable  # computing it again helps
        assert target.engine.counters.content_errors == 1
        target.engine.counters.content_errors = 0


@pytest.mark.parametrize(
    "how", ["unknown", "ended", "waits", "computes", "cancelled", "other-epoch", "too-far-behind"]
)
async def test_nothing_to_move(how: str) -> None:
    async with Rig() as rig:
        source, target = rig.workers
        await rig.connect(source, target)
        rig.n_prompt[A] = 20
        rig.prompts[A] = prompt(20)
        if how == "ended":
            source.grant(None)
            rig.start(source, A, prompt(20))
            await rig.ends(A)
        elif how == "waits":
            rig.start(source, C, prompt(900, salt=3), mode=Mode.PREFILL)
            await until(lambda: rig.frontend.count(C) == 1)
            rig.start(source, A, prompt(200))
            await until(lambda: stage(source) is Stage.WAITING)
        elif how == "computes":
            source.grant(0)
            rig.start(source, A, prompt(200))
            source.grant(1)
            await until(lambda: stage(source) is Stage.PREFILL)
        elif how != "unknown":
            await rig.stands_at(source, A, prompt(20), 30)
        if how == "cancelled":
            rig.cancel(source, A)
            await until(lambda: not source.host.attempts)
        known = (
            1
            if how == "too-far-behind"
            else 0
            if how in ("unknown", "ended", "waits", "computes")
            else None
        )
        epoch = 7 if how == "other-epoch" else None
        rig.move(source, A, target, B, known=known, epoch=epoch, reserve_tokens=8)
        await rig.ends(B)
        ended = rig.frontend.ended[B][0]
        assert ended.error
        assert ended.retryable
        if how == "waits":
            rig.cancel(source, C)
        source.grant(None)
        if how not in ("unknown", "cancelled"):
            await rig.ends(A)
            rig.frontend.tokens(A)


async def test_second_reader_is_refused() -> None:
    async with Rig(3) as rig:
        source, _, other = rig.workers
        flow = await copied(rig)
        rig.move(source, A, other, C)
        await rig.ends(C)
        assert "another reader" in (rig.frontend.ended[C][0].error or "")
        flow()
        await rig.ends(A, B)
        assert rig.frontend.stream(A, B) == await rig.reference(prompt(20))


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


async def test_late_words_are_refused() -> None:
    """After the end of a move nothing that its reader says changes anything."""
    async with Rig() as rig:
        source, target = rig.workers
        await copying(rig)
        link = reader_link(target)
        generation = source.host.moves._moves[AttemptId(A)].generation
        rig.cancel(target, B)
        await until(lambda: source.host.moves.idle)
        for word in (Ready(A, generation), Confirm(A, generation), Detach(A)):
            link.send(word)
        await goes_on_at_source(rig)
        assert source.out == {"detached": 1}
        target.local.faults.hang = False


async def test_confirm_before_the_last_chunk_is_refused() -> None:
    async with Rig() as rig:
        source, target = rig.workers
        flow = await copied(rig)
        generation = source.host.moves._moves[AttemptId(A)].generation
        reader_link(target).send(Confirm(A, generation))
        await rig.ends(B)
        flow()
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


async def test_no_room_at_the_target() -> None:
    async with Rig(deadlines=Deadlines(transfer_ms=3000, queue_ms=200, prefill_ms=3000)) as rig:
        flow = await waiting(rig)
        await rig.ends(B)
        assert "room" in (rig.frontend.ended[B][0].error or "")
        flow()
        await goes_on_at_source(rig, 120)


@pytest.mark.parametrize("old", ["source", "target"])
async def test_older_wire(old: str) -> None:
    """An old target asks as for a prompt; an old source would not know what it is asked."""
    async with Rig(wire_versions=(1, 2) if old == "source" else (2, 1)) as rig:
        source, target = rig.workers
        await rig.stands_at(source, A, prompt(20), POSITION)
        if old == "target":  # it does not know the field
            rig.move(source, A, target, B, live=False)
        else:
            rig.move(source, A, target, B)
        await rig.ends(B)
        why = "does not know that" if old == "target" else "too old"
        assert why in (rig.frontend.ended[B][0].error or "")
        assert rig.frontend.ended[B][0].retryable
        await goes_on_at_source(rig)


async def test_engine_that_cannot() -> None:
    async with Rig() as rig:
        source, target = rig.workers
        source.engine.capabilities = type(source.engine.capabilities)(migrate_kv=False)
        await rig.stands_at(source, A, prompt(20), POSITION)
        rig.move(source, A, target, B)
        await rig.ends(B)
        assert rig.frontend.ended[B][0].retryable
        rig.move(target, A, source, C)
        await rig.ends(C)
        assert rig.frontend.outcome(C) == "error"
        await goes_on_at_source(rig)


async def test_beside_another_hand_off() -> None:
    """A prompt's KV is read from the source while a running request leaves it."""
    async with Rig() as rig:
        source, target = rig.workers
        await copying(rig)
        me = source.host.me
        source.grant(0)
        rig.start(source, 70, prompt(40, salt=7), mode=Mode.PREFILL)
        await until(lambda: stage(source, 70) is not None)
        source.grant(1)
        await until(lambda: rig.frontend.count(70) == 1)
        rig.n_prompt[71] = 40
        handoff = Handoff(source.address, me.ident, me.epoch, 70)
        rig._submit(target, 71, prompt(40, salt=7), Mode.DECODE, handoff=handoff)
        await until(lambda: len(target.local._reads) == 2)
        target.local.faults.hang = False
        await rig.ends(A, B, 71)
        assert rig.frontend.outcome(A) == "moved"
        assert rig.frontend.stream(A, B) == await rig.reference(prompt(20))
        assert rig.frontend.stream(70, 71) == await rig.reference(prompt(40, salt=7))


async def test_short_one_is_paused_at_once() -> None:
    """Nothing but the last chunk where no block is full yet."""
    async with Rig() as rig:
        source, target = rig.workers
        await rig.connect(source, target)
        await rig.stands_at(source, A, prompt(3), 2)
        (link,) = [ln for ln in source.host._server._links if ln.peer and ln.peer.kind == "worker"]
        sent: list[Message] = []
        let_go = held(link, (Chunk,), sent)
        rig.move(source, A, target, B)
        await until(lambda: sent)
        let_go()
        await rig.ends(A, B)
        (chunk,) = sent
        assert isinstance(chunk, Chunk)
        assert (chunk.first, chunk.last) == (0, True)
        assert rig.frontend.stream(A, B) == await rig.reference(prompt(3))
