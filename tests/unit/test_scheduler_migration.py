"""serving.engine.scheduler: sequences that are shared, paused, taken over elsewhere, or go on."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass

import pytest

from serving.engine.base import AttemptId, ChunkReady, Mode, Work
from serving.engine.live_sequence import Stage
from tests.engine_rig import Rig, continuation, prompt, work

A, B = AttemptId(1), AttemptId(2)
SIZE = 8  # block
TOKENS = prompt(20)
SERIAL = 77


def running(n_generated: int = 3, max_tokens: int = 30, rig: Rig | None = None) -> Rig:
    rig = rig or Rig()
    rig.submit(work(A, TOKENS, max_tokens=max_tokens))
    while len(rig.told.tokens.get(A, [])) < n_generated:
        rig.step()
    return rig


def share(rig: Rig, n_tokens: int = 23, most_tokens: int = 200) -> None:
    rig.scheduler.share(A, SERIAL, n_tokens, most_tokens)


def chunks(rig: Rig) -> list[ChunkReady]:
    """Without a step."""
    output = rig.scheduler.collect()
    rig.told.add(output)
    return output.chunks


def test_full_blocks_first_then_the_rest() -> None:
    rig = running()
    share(rig)
    (first,) = chunks(rig)
    assert (first.first, len(first.blocks), first.last, first.share) == (0, 2, False, SERIAL)
    assert rig.runner.holds(TOKENS, 0, first.blocks)
    rig.step()
    rig.step()
    rig.scheduler.pause(A)
    (last,) = chunks(rig)
    text = TOKENS + array("I", continuation(TOKENS, 5))
    assert (last.first, last.last, last.share) == (2, True, SERIAL)
    assert last.tokens == text[23:].tolist()
    assert last.token == text[-1]
    assert len(last.blocks) == 1  # 24 tokens have KV
    assert rig.runner.holds(text[:24], 2, last.blocks)
    assert not rig.scheduler.runnable
    states = rig.scheduler.load().blocks
    assert (states.used, states.leased) == (3, 0)  # none for its next token
    rig.scheduler.release(A)
    output = rig.step()
    assert not output.finished
    assert not output.failed
    assert output.load.blocks.cached == 3
    rig.assert_idle()


@pytest.mark.parametrize("n_before", range(1, 12))
def test_paused_goes_on(n_before: int) -> None:
    """At whatever place within a block: it lacks a block for its next token at some."""
    rig = running(n_before)
    share(rig, 20 + n_before)
    rig.step()
    rig.scheduler.pause(A)
    rig.scheduler.pause(A)
    assert len(chunks(rig)) == 1
    for _ in range(3):
        assert rig.step().tokens == []
    rig.scheduler.resume(A)
    rig.scheduler.resume(A)
    rig.run()
    assert rig.told.tokens[A] == continuation(TOKENS, 30)
    rig.assert_idle()


def test_paused_and_back_before_the_next_step_takes_one_block() -> None:
    rig = running(5)  # 24 tokens have KV: the next one needs a block
    share(rig, 25)
    rig.scheduler.pause(A)
    rig.scheduler.resume(A)
    rig.step()
    assert rig.scheduler.load().blocks.used == 4
    rig.run()
    assert rig.told.tokens[A] == continuation(TOKENS, 30)


@pytest.mark.parametrize(
    ("n_tokens", "most_tokens", "shared"),
    [
        pytest.param(23, 23, True, id="exactly"),
        pytest.param(20, 24, True, id="knows-less"),
        pytest.param(24, 30, False, id="knows-more"),
        pytest.param(20, 22, False, id="no-room"),
    ],
)
def test_bounds_of_the_reader(n_tokens: int, most_tokens: int, shared: bool) -> None:
    rig = running()
    share(rig, n_tokens, most_tokens)
    told = chunks(rig)
    assert (told[0].token is None and told[0].last) is not shared
    rig.step()
    rig.step()
    if shared:  # it stops when there is no room for the next
        assert len(rig.told.tokens[A]) == most_tokens - 20
        rig.scheduler.resume(A)
    rig.run()
    assert rig.told.tokens[A] == continuation(TOKENS, 30)


def test_only_what_decodes_is_shared() -> None:
    rig = Rig(chunk_tokens=8)
    share(rig)
    rig.submit(work(A, TOKENS))
    share(rig)
    rig.step()
    share(rig)
    told = [*rig.told.chunks[A], *chunks(rig)]
    assert len(told) == 3  # unknown, waits, computes
    for chunk in told:
        assert (chunk.blocks, chunk.last, chunk.token, chunk.share) == ([], True, None, SERIAL)
    rig.run()
    rig.assert_idle()


def test_shared_once() -> None:
    rig = running()
    share(rig)
    share(rig)
    assert [chunk.last for chunk in chunks(rig)] == [False, True]
    rig.scheduler.pause(A)
    (last,) = chunks(rig)
    assert last.token is not None


def test_finishes_while_shared() -> None:
    rig = running(3, max_tokens=5)
    share(rig)
    rig.run()
    assert len(rig.told.chunks[A]) == 1  # the end is told, no chunk
    rig.scheduler.pause(A)
    rig.scheduler.resume(A)
    assert chunks(rig) == []
    rig.assert_idle()


@pytest.mark.parametrize("paused", [False, True])
def test_cancel(paused: bool) -> None:
    rig = running()
    share(rig)
    if paused:
        rig.scheduler.pause(A)
    rig.scheduler.cancel(A)
    rig.scheduler.resume(A)
    rig.step()
    assert A not in rig.told.finished
    rig.assert_idle()


def test_paused_keeps_its_place_in_the_batch() -> None:
    rig = running(rig=Rig(max_batch=2))
    rig.submit(work(3, prompt(9, salt=3), max_tokens=20), work(4, prompt(9, salt=4), max_tokens=20))
    share(rig)
    rig.scheduler.pause(A)
    for _ in range(5):
        rig.step()
        assert rig.scheduler.load().running == 2
    assert 4 not in rig.told.started
    rig.scheduler.resume(A)
    while rig.scheduler.n_live:
        assert len(rig.scheduler.schedule().decodes) <= 2
        rig.step()
    assert rig.told.tokens[A] == continuation(TOKENS, 30)


def test_waits_for_its_place_and_moves_on() -> None:
    """What came here and has no place in the batch yet can leave again, or come back to its wait."""
    source, target = running(), Rig(max_batch=1)
    target.submit(work(9, prompt(9, salt=9), max_tokens=60))
    target.step()
    move(source, target, A, B)
    target.step()
    assert target.scheduler._live[B].stage is Stage.READY
    for _ in range(2):
        target.scheduler.share(B, 1, 23, 60)
        target.scheduler.pause(B)
        (first, last) = chunks(target)
        assert (len(first.blocks), len(last.blocks), last.tokens) == (2, 1, [])
        target.step()
        target.scheduler.resume(B)
    target.run()
    assert target.told.tokens[B] == continuation(TOKENS, 30)[3:]


def move(source: Rig, target: Rig, old: AttemptId, new: AttemptId, known: int = 3) -> None:
    """What the roles do, at once."""
    share_of = source.scheduler._live[old].work
    text = source.scheduler._live[old].tokens[: share_of.n_prompt + known]
    target.submit(taken(share_of, new, text, reserve=16))
    target.step()
    reserved = target.told.reserved[new]
    source.scheduler.share(old, SERIAL, len(text), len(reserved.blocks) * SIZE)
    source.scheduler.pause(old)
    blocks = [block for chunk in chunks(source) for block in chunk.blocks]
    (*_, last) = source.told.chunks[old]
    assert last.token is not None
    target.runner.copy(source.runner, list(zip(blocks, reserved.blocks, strict=False))[reserved.n_cached :])
    source.scheduler.release(old)
    target.scheduler.reserved(new, last.tokens)
    target.scheduler.kv_arrived(new, last.token)


def taken(old: Work, new: int, text: array[int], reserve: int) -> Work:
    return Work(
        AttemptId(new), Mode.DECODE, text, old.n_prompt, old.params, old.namespace, reserve_tokens=reserve
    )


@pytest.mark.parametrize("cached", [False, True])
def test_taken_over(cached: bool) -> None:
    source, target = running(5), Rig()
    if cached:
        target.submit(work(9, TOKENS[:17], max_tokens=1))
        target.run()
    move(source, target, A, B)
    target.run()
    source.step()
    assert target.told.reserved[B].n_cached == (2 if cached else 0)
    assert source.told.tokens[A] + target.told.tokens[B] == continuation(TOKENS, 30)
    assert target.told.first[B] == 5
    assert target.counters.prompt_tokens_computed == (17 if cached else 0)
    source.assert_idle()
    target.assert_idle()


def test_reserve_is_for_the_move_alone() -> None:
    """Preempted later, it waits for no more room than another."""
    source, target = running(5), Rig()
    move(source, target, A, B)
    target.step()
    seq = target.scheduler._live[B]
    target.scheduler._preempt(seq)
    assert target.scheduler._tables.needed(seq) == -(-(len(seq.tokens) + 1) // SIZE)
    target.run()
    assert source.told.tokens[A] + target.told.tokens[B] == continuation(TOKENS, 30)


def test_reserve_ends_with_the_request() -> None:
    """No room is asked for what can never be drawn."""
    rig = Rig()
    rig.submit(taken(work(9, TOKENS, max_tokens=4), 1, TOKENS + prompt(3), reserve=1000))
    rig.step()
    assert len(rig.told.reserved[A].blocks) == 3
    rig.scheduler.cancel(A)
    rig.submit(taken(work(9, TOKENS, max_tokens=4000), 1, TOKENS + prompt(3), reserve=10_000))
    rig.step()
    assert "KV blocks" in rig.told.failed[A].message
    rig.assert_idle()


# ---------------------------------------------------------------- whatever happens


@dataclass
class Leaving:
    """One move that is under way."""

    source: Rig
    target: Rig
    old: AttemptId
    new: AttemptId
    serial: int
    shared: bool = False
    paused: bool = False
    copied: int = 0  # blocks


@pytest.mark.parametrize("seed", range(40))
def test_any_mix_gets_done(seed: int) -> None:
    """Between two engines whose pools are too small: shares at any time, that end in any way."""
    rng = random.Random(seed)
    rigs = [Rig(n_blocks=18, chunk_tokens=16, max_batch=4) for _ in range(2)]
    works = [
        work(i, prompt(rng.randint(3, 50), salt=i), max_tokens=rng.randint(1, 40)) for i in range(1, 13)
    ]
    where: dict[int, list[tuple[Rig, AttemptId]]] = {w.attempt: [] for w in works}  # the way of each
    waiting = list(works)
    moves: list[Leaving] = []
    names = iter(range(1000, 100_000))

    def over(move: Leaving) -> None:
        moves.remove(move)
        move.target.scheduler.cancel(move.new)

    for _ in range(3000):
        if waiting and rng.random() < 0.4:
            begun = waiting.pop(0)
            rig = rng.choice(rigs)
            where[begun.attempt].append((rig, begun.attempt))
            rig.submit(begun)
        for way in where.values():
            if not way or rng.random() > 0.3:
                continue
            source, old = way[-1]
            seq = source.scheduler._live.get(old)
            if seq is None or any(m.old == old for m in moves):
                continue
            target = rigs[1 - rigs.index(source)]
            known = rng.randint(seq.work.n_prompt, len(seq.tokens))
            new, serial = AttemptId(next(names)), next(names)
            target.submit(taken(seq.work, new, seq.tokens[:known], reserve=rng.randint(1, 12)))
            moves.append(Leaving(source, target, old, new, serial))
        for move in list(moves):
            source, target = move.source, move.target
            told = [c for c in source.told.chunks.get(move.old, []) if c.share == move.serial]
            reserved = target.told.reserved.get(move.new)
            if move.new in target.told.failed:
                source.scheduler.resume(move.old)
                moves.remove(move)
            elif reserved is None:
                if rng.random() < 0.05:
                    over(move)
            elif not move.shared:
                n_tokens = len(target.scheduler._live[move.new].tokens)
                source.scheduler.share(move.old, move.serial, n_tokens, len(reserved.blocks) * SIZE)
                move.shared = True
            elif move.old in source.told.finished or (told and told[-1].last and told[-1].token is None):
                over(move)
            elif rng.random() < 0.05:  # the target gives up
                source.scheduler.resume(move.old)
                over(move)
            elif told and not told[-1].last and rng.random() < 0.3:
                source.scheduler.pause(move.old)
            elif told and told[-1].last and told[-1].token is not None and rng.random() < 0.5:
                blocks = [block for chunk in told for block in chunk.blocks]
                pairs = list(zip(blocks, reserved.blocks, strict=False))[reserved.n_cached :]
                target.runner.copy(source.runner, pairs)
                source.scheduler.release(move.old)
                target.scheduler.reserved(move.new, told[-1].tokens)
                target.scheduler.kv_arrived(move.new, told[-1].token)
                where[next(w for w, way in where.items() if way and way[-1][1] == move.old)].append(
                    (target, move.new)
                )
                moves.remove(move)
        for rig in rigs:
            rig.step()
        if not waiting and not moves and not any(rig.scheduler.n_live for rig in rigs):
            break
    else:
        raise AssertionError("no progress")
    n_moved = 0
    for w in works:
        way = where[w.attempt]
        n_moved += len(way) - 1
        told_tokens = [token for rig, attempt in way for token in rig.told.tokens.get(attempt, [])]
        assert told_tokens == continuation(w.tokens, w.params.max_tokens)
        last_rig, last_attempt = way[-1]
        assert last_attempt in last_rig.told.finished
    for rig in rigs:
        rig.step()
        rig.assert_idle()
    assert n_moved > 0
