"""Moves that are refused: nothing to move, no room, an older peer, a word too early or too late."""

from __future__ import annotations

import pytest

from serving.engine.base import AttemptId, Mode
from serving.engine.live_sequence import Stage
from serving.wire import Confirm, Detach, Ready
from tests.unit.handoff_fakes import until
from tests.unit.migration_rig import Rig, prompt
from tests.unit.migration_states import (
    POSITION,
    A,
    B,
    C,
    confirming,
    copied,
    copying,
    goes_on_at_source,
    reader_link,
    stage,
)


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
