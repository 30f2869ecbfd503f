"""The states of a move, each with a way to get there and hold it, and what follows when it fails."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from serving.engine.base import AttemptId, Mode
from serving.engine.live_sequence import Stage
from serving.kv.peer_link import PeerLink
from serving.wire import Confirm, Message, Ready
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
