"""serving.engine.scheduler: prompts that wait for a peer's cached prefix, and the peer that lends it."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable

import pytest

from serving.engine.base import LENT, AttemptId, BlockId, Mode, Work
from tests.engine_rig import Rig, continuation, prompt, work

A, LOAN = AttemptId(1), AttemptId(1 << 63 | 1)
SIZE = 8  # block
TOKENS = prompt(60)
HELD = 48  # of them the owner has
FREE = 64


def owner(n_tokens: int = HELD) -> Rig:
    """Has the first `n_tokens` cached."""
    rig = Rig()
    rig.submit(work(9, TOKENS[: n_tokens + 1], max_tokens=1))
    rig.run()
    return rig


def lend(rig: Rig, tokens: array[int], namespace: int = 7) -> list[BlockId]:
    """What is lent under LOAN."""
    rig.scheduler.lend(LOAN, namespace, tokens)
    (chunk,) = rig.step().chunks
    assert (chunk.attempt, chunk.first, chunk.last) == (LOAN, 0, True)
    assert chunk.token == (LENT if chunk.blocks else None)
    return chunk.blocks


def pull(source: Rig, target: Rig, attempt: int = 1, come: int | None = None) -> int:
    """What the roles do after Reserved; returns the blocks that came, at most `come`."""
    ours = target.told.reserved[attempt]
    theirs = lend(source, TOKENS[: len(ours.blocks) * SIZE])[:come]
    target.runner.copy(source.runner, list(zip(theirs, ours.blocks, strict=False))[ours.n_cached :])
    source.scheduler.release(LOAN)
    target.scheduler.prefix_arrived(AttemptId(attempt), max(len(theirs), ours.n_cached))
    return len(theirs)


def prefilled(rig: Rig, attempt: int = 1) -> None:
    """What follows a PREFILL: its reader is done."""
    rig.scheduler.release(AttemptId(attempt))
    rig.step()


@pytest.mark.parametrize("mode", [Mode.LOCAL, Mode.PREFILL])
@pytest.mark.parametrize(
    ("own", "held", "asked", "computed"),
    [
        pytest.param(0, 48, 48, 12, id="all"),
        pytest.param(16, 48, 48, 12, id="beyond-its-own"),
        pytest.param(0, 24, 48, 36, id="owner-has-less"),
        pytest.param(0, 48, 24, 36, id="asked-for-less"),
        pytest.param(0, 48, 29, 36, id="full-blocks-only"),
        pytest.param(48, 24, 24, 12, id="has-more-itself"),
        pytest.param(0, 56, 1000, 4, id="last-token-is-computed"),
    ],
)
def test_pull_then_prefill(mode: Mode, own: int, held: int, asked: int, computed: int) -> None:
    source, target = owner(held), Rig()
    if own:
        target.submit(work(5, TOKENS[: own + 1], max_tokens=1))
        target.run()
    before = target.counters.prompt_tokens_computed
    target.submit(work(1, TOKENS, mode, pull_tokens=asked))
    target.run()
    assert 1 not in target.told.started  # waits without computing
    assert target.scheduler.load().waiting_tokens == 60 - max(own, min(asked, 56) // SIZE * SIZE)
    reserved = target.told.reserved[1]
    assert reserved.n_cached == min(own // SIZE, len(reserved.blocks))
    pull(source, target)
    output = target.step()
    target.run()
    if mode is Mode.PREFILL:
        prefilled(target)
    assert target.counters.prompt_tokens_computed - before == computed
    assert target.told.started[1].n_cached == 60 - computed
    assert target.counters.prompt_tokens_cached == own
    assert target.counters.prompt_tokens_pulled == 60 - computed - own
    assert target.told.tokens[1] == continuation(TOKENS, 1 if mode is Mode.PREFILL else 4)
    assert sum(len(run.hashes) for run in output.stored) == (60 // SIZE) - own // SIZE  # blocks_indexed
    target.assert_idle()
    source.step()
    source.assert_idle()


@pytest.mark.parametrize("reserved", [True, False], ids=["reserved", "waiting"])
def test_pull_that_fails_is_computed(reserved: bool) -> None:
    rig = Rig()
    rig.submit(work(1, TOKENS, pull_tokens=HELD))
    if reserved:
        rig.step()
    rig.scheduler.prefix_arrived(A, 0)
    rig.scheduler.prefix_arrived(A, 3)  # too late for anything
    rig.run()
    assert rig.counters.prompt_tokens_computed == 60
    assert rig.told.tokens[1] == continuation(TOKENS, 4)
    rig.assert_idle()


def test_others_compute_meanwhile() -> None:
    rig = Rig()
    rig.submit(work(1, TOKENS, pull_tokens=HELD), work(2, prompt(30, salt=2)))
    rig.run()
    assert rig.told.tokens[2] == continuation(prompt(30, salt=2), 4)
    assert 1 not in rig.told.started
    rig.scheduler.cancel(A)
    rig.step()
    rig.assert_idle()


def _waiting(rig: Rig) -> None:
    pass


def _reserved(rig: Rig) -> None:
    rig.step()


def _arrived(rig: Rig) -> None:
    rig.step()
    pull(owner(), rig)


def _computing(rig: Rig) -> None:
    _arrived(rig)
    rig.step()
    assert 1 in rig.told.started


@pytest.mark.parametrize("mode", [Mode.LOCAL, Mode.PREFILL])
@pytest.mark.parametrize("quarantine", [False, True])
@pytest.mark.parametrize(
    "reach", [_waiting, _reserved, _arrived, _computing], ids=lambda f: f.__name__.strip("_")
)
def test_cancel_in_every_state(reach: Callable[[Rig], None], quarantine: bool, mode: Mode) -> None:
    rig = Rig(chunk_tokens=8)
    rig.submit(work(1, TOKENS, mode, pull_tokens=HELD, max_tokens=9))
    reach(rig)
    rig.scheduler.cancel(A, quarantine)
    rig.scheduler.prefix_arrived(A, 6)  # was on its way
    states = rig.step().load.blocks
    assert (states.used, states.leased) == (0, 0)
    assert (states.quarantined > 0) is (quarantine and reach is not _waiting)
    rig.pool.end_quarantine(A)
    rig.run()
    rig.assert_idle()


def test_pull_in_quarantine_is_not_found() -> None:
    rig = Rig()
    rig.submit(work(1, TOKENS, pull_tokens=HELD))
    rig.step()
    rig.scheduler.cancel(A, True)
    rig.submit(work(2, TOKENS))
    rig.run()
    assert rig.told.started[2].n_cached == 0
    assert rig.told.tokens[2] == continuation(TOKENS, 4)


# ---------------------------------------------------------------- the owner


def test_nothing_is_lent_that_is_not_there() -> None:
    rig = owner()
    assert lend(rig, prompt(48, salt=3)) == []
    assert lend(rig, TOKENS[:48], namespace=8) == []  # salt_isolates
    assert lend(rig, TOKENS[:7]) == []
    rig.assert_idle()


def test_lent_blocks_stay_until_released() -> None:
    rig = owner()
    blocks = lend(rig, TOKENS[:40])
    assert rig.runner.holds(TOKENS, 0, blocks)
    assert rig.scheduler.load().blocks.leased == 5
    rig.submit(*(work(20 + i, prompt(200, salt=20 + i)) for i in range(8)))  # more than the rest can hold
    rig.run()
    assert rig.runner.holds(TOKENS, 0, blocks)
    rig.scheduler.release(LOAN)
    rig.scheduler.release(LOAN)
    rig.step()
    rig.assert_idle()


def test_lent_while_in_use() -> None:
    rig = owner()
    rig.submit(work(2, TOKENS, max_tokens=30))
    rig.step()
    assert len(lend(rig, TOKENS[:48])) == 6
    rig.run()
    assert rig.scheduler.load().blocks.leased == 6
    rig.scheduler.release(LOAN)
    rig.step()
    rig.assert_idle()


def test_name_of_a_live_attempt_gets_nothing() -> None:
    rig = owner()
    rig.submit(work(1, TOKENS, max_tokens=30))
    rig.step()
    rig.scheduler.lend(A, 7, TOKENS[:48])
    (chunk,) = rig.step().chunks
    assert (chunk.blocks, chunk.token) == ([], None)


# ---------------------------------------------------------------- whatever happens


@pytest.mark.parametrize("seed", range(40))
def test_any_mix_gets_done(seed: int) -> None:
    """Pulls and others in a pool that is too small, pulls ending in any way at any time."""
    rng = random.Random(seed)
    source, target = owner(56), Rig(n_blocks=20, chunk_tokens=16)
    works: list[Work] = []
    for i in range(1, 15):
        tokens = TOKENS[: rng.randint(10, 56)] + prompt(rng.randint(0, 30), salt=i)
        mode = rng.choice([Mode.LOCAL, Mode.PREFILL])
        asked = rng.choice([0, 24, 56])
        works.append(work(i, tokens, mode, max_tokens=rng.randint(1, 12), pull_tokens=asked))
    waiting, live = list(works), {w.attempt for w in works}
    for _ in range(2000):
        if waiting and rng.random() < 0.4:
            target.submit(waiting.pop(0))
        target.step()
        for attempt, reserved in target.told.reserved.items():
            if attempt in live and rng.random() < 0.2:
                live.discard(AttemptId(attempt))
                what = rng.random()
                if what < 0.15:
                    target.scheduler.cancel(AttemptId(attempt), quarantine=what < 0.1)
                elif what < 0.4:
                    target.scheduler.prefix_arrived(AttemptId(attempt), reserved.n_cached)
                else:
                    tokens = works[attempt - 1].tokens[: len(reserved.blocks) * SIZE]
                    theirs = lend(source, tokens)
                    pairs = list(zip(theirs, reserved.blocks, strict=False))[reserved.n_cached :]
                    target.runner.copy(source.runner, pairs)
                    source.scheduler.release(LOAN)
                    n_blocks = max(len(theirs), reserved.n_cached)
                    target.scheduler.prefix_arrived(AttemptId(attempt), n_blocks)
        for attempt, chunks in target.told.chunks.items():
            if chunks[-1].last and rng.random() < 0.3:
                target.scheduler.release(AttemptId(attempt))
        if rng.random() < 0.1:
            for w in works:
                target.pool.end_quarantine(w.attempt)
        if not waiting and not target.scheduler.n_live:
            break
    else:
        raise AssertionError("no progress")
    for w in works:
        target.scheduler.release(w.attempt)
        target.pool.end_quarantine(w.attempt)
        told = target.told.tokens.get(w.attempt, [])
        assert told == continuation(w.tokens, len(told))
        if w.attempt in target.told.finished:
            assert len(told) == w.params.max_tokens
    target.step()
    target.assert_idle()
