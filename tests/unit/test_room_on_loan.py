"""Room that decode reserves for KV nobody has begun to compute is on loan: no pools wait for each other."""

from __future__ import annotations

import random
from threading import Barrier, Thread

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.engine.base import AttemptId, Mode, Reserved, Work
from tests.engine_rig import DECODE, LOCAL, PREFILL, Rig, arrive, continuation, prompt, work

SIZE = 8  # tokens of a block


def reader(attempt: int, n_tokens: int, **changes: int) -> Work:
    return work(attempt, prompt(n_tokens, salt=attempt), DECODE, max_tokens=3, **changes)


def begin(rig: Rig, attempt: int) -> None:
    rig.scheduler.kv_begun(AttemptId(attempt))
    rig.step()


# ---------------------------------------------------------------- who takes what back


@pytest.mark.parametrize("waits", ["reader", "prompt", "decode"])
def test_who_can_use_room_takes_back_what_is_on_loan(waits: str) -> None:
    """10 blocks, 6 of them for KV that nobody has begun with. Its reader gets others when that begins."""
    rig = Rig(n_blocks=10, block_tokens=SIZE)
    if waits == "decode":
        rig.submit(work(2, prompt(24, salt=2), max_tokens=30))  # 4 blocks, later 7
        rig.step()
    rig.submit(reader(1, 44))
    rig.step()
    offer = rig.told.reserved[1]
    assert len(offer.blocks) == 6
    if waits == "reader":
        rig.submit(reader(2, 40, priority=-1))
        rig.step()
        assert 2 not in rig.told.reserved  # nothing to read yet: it takes nothing back
        begin(rig, 2)
        assert rig.told.reserved[2].claim()
        arrive(rig, 2)
    elif waits == "prompt":
        rig.submit(work(2, prompt(40, salt=2), LOCAL, max_tokens=30, priority=-1))
    rig.run()
    assert 2 in rig.told.finished
    assert rig.counters.preemptions == 0
    assert not offer.claim()
    begin(rig, 1)
    assert rig.told.reserved[1].claim()
    arrive(rig, 1)
    rig.run()
    assert rig.told.tokens[1] == continuation(prompt(44, salt=1), 3)[1:]
    rig.assert_idle()


@pytest.mark.parametrize("how", ["claimed", "begun", "arrived"])
def test_what_is_in_use_is_not_taken_back(how: str) -> None:
    rig = Rig(n_blocks=10, block_tokens=SIZE)
    rig.submit(reader(1, 44))
    rig.step()
    offer = rig.told.reserved[1]
    if how == "claimed":
        assert offer.claim()
    elif how == "begun":
        begin(rig, 1)
    else:
        arrive(rig, 1)
    rig.submit(work(2, prompt(40, salt=2), LOCAL, max_tokens=1))
    rig.step()
    assert 2 not in rig.told.tokens
    if how != "arrived":
        assert rig.scheduler.reserved(AttemptId(1)) is not None
        assert offer.claim() == (how == "begun")
        arrive(rig, 1)
    rig.run()
    assert rig.told.tokens[1] == continuation(prompt(44, salt=1), 3)[1:]
    assert 2 in rig.told.tokens
    rig.assert_idle()


def test_a_claim_that_the_engine_finds_out_by_taking_back_may_be_told_late() -> None:
    """The reader asked for room before the offer reached it, and claimed that: both are on their way."""
    rig = Rig(n_blocks=10, block_tokens=SIZE)
    rig.submit(reader(1, 44))
    rig.step()
    assert rig.told.reserved[1].claim()
    rig.submit(work(2, prompt(40, salt=2), LOCAL, max_tokens=1))
    rig.step()
    begin(rig, 1)
    arrive(rig, 1)
    begin(rig, 1)  # once more, of one that decodes
    rig.run()
    assert rig.told.tokens[1] == continuation(prompt(44, salt=1), 3)[1:]
    assert 2 in rig.told.tokens
    rig.assert_idle()


def test_nothing_is_lent_out_while_one_waits_who_would_take_it_back() -> None:
    """A prompt lacks more than that: it would be lent and taken back in every turn."""
    rig = Rig(n_blocks=10, block_tokens=SIZE)
    rig.submit(reader(9, 30))  # 4 blocks
    rig.step()
    assert rig.told.reserved[9].claim()
    rig.submit(reader(1, 30, priority=1))  # 4 blocks, due before
    rig.submit(work(2, prompt(60, salt=2), LOCAL, max_tokens=1))  # 8 blocks
    told = [bool(rig.step().reserved) for _ in range(10)]
    assert not any(told[2:])
    assert not rig.scheduler.runnable
    arrive(rig, 9)
    rig.run()
    assert 2 in rig.told.tokens
    assert 1 in rig.told.reserved


def test_the_last_in_order_loses_its_loan_first() -> None:
    rig = Rig(n_blocks=12, block_tokens=SIZE)
    rig.submit(reader(1, 30), reader(2, 30, priority=-1), reader(3, 30))
    rig.step()
    offers = {attempt: rig.told.reserved[attempt] for attempt in (1, 2, 3)}
    rig.submit(work(4, prompt(20, salt=4), max_tokens=1))
    rig.step()
    assert [offers[attempt].claim() for attempt in (1, 2, 3)] == [True, False, True]


def test_nobody_reserves_what_gathers_for_one_that_can_use_it() -> None:
    """A lease holds the rest; meanwhile the blocks left are not lent out."""
    rig = Rig(n_blocks=10, block_tokens=SIZE)
    rig.submit(work(9, prompt(32, salt=9), PREFILL))
    rig.run()
    rig.submit(reader(1, 60))
    begin(rig, 1)
    rig.submit(reader(2, 20, priority=5))
    rig.step()
    assert not rig.told.reserved
    rig.scheduler.release(AttemptId(9))
    rig.step()
    assert list(rig.told.reserved) == [1]


@pytest.mark.parametrize("quarantine", [False, True])
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("taken_back", [False, True])
def test_cancel(taken_back: bool, begun: bool, quarantine: bool) -> None:
    rig = Rig(n_blocks=10, block_tokens=SIZE)
    rig.submit(reader(1, 44))
    rig.step()
    if taken_back:
        rig.submit(work(2, prompt(40, salt=2), max_tokens=20))
        rig.step()
    if begun:
        begin(rig, 1)
    rig.scheduler.cancel(AttemptId(1), quarantine)
    begin(rig, 1)  # late: nobody of that name
    rig.pool.end_quarantine(AttemptId(1))
    rig.run()
    rig.assert_idle()


def test_one_of_two_claims() -> None:
    for _ in range(100):
        offer, barrier, won = Reserved(AttemptId(1), [], 0), Barrier(2), []

        def claim(offer: Reserved = offer, barrier: Barrier = barrier, won: list[bool] = won) -> None:
            barrier.wait()
            won.append(offer.claim())

        threads = [Thread(target=claim) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(won) == [False, True]


# ---------------------------------------------------------------- pools that wait for each other


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 2))
def test_no_circle_of_waits(seed: int, n_prefill: int, n_decode: int) -> None:
    """Prefill and decode workers whose pools hold little more than the longest request; prompts come in any
    order at each. Every request gets done, whoever acts when."""
    rng = random.Random(seed)
    longest = 80

    def rig() -> Rig:
        n_blocks = rng.randrange(longest // SIZE + 1, longest * 2 // SIZE)
        chunk = rng.choice([8, 24, 100])
        return Rig(n_blocks, SIZE, chunk, max_batch=rng.choice([1, 4, 16]), step_s=rng.choice([0.0, 0.01]))

    prefills, decodes = [rig() for _ in range(n_prefill)], [rig() for _ in range(n_decode)]
    asked: dict[int, tuple[Work, Rig, Rig]] = {}
    submits: list[tuple[Rig, Work]] = []
    for attempt in range(16):
        tokens = prompt(rng.randrange(1, longest - 20), salt=rng.randrange(4) if attempt % 2 else attempt)
        if rng.random() < 0.1:
            decode = rng.choice(decodes)
            submits.append((decode, work(100 + attempt, tokens, Mode.LOCAL, max_tokens=20)))
            continue
        ask = work(attempt, tokens, PREFILL, max_tokens=20, priority=rng.choice([0, 0, 1, -2]))
        asked[attempt] = ask, rng.choice(prefills), rng.choice(decodes)
        submits.append((asked[attempt][1], ask))
        reads = work(attempt, tokens, DECODE, max_tokens=20, priority=ask.priority)
        submits.append((asked[attempt][2], reads))
    rng.shuffle(submits)
    claimed, read = set[int](), set[int]()

    def read_on(attempt: int) -> None:
        _, owner, ours = asked[attempt]
        chunks = owner.told.chunks.get(attempt)
        if not chunks or attempt in read:
            return
        if attempt not in claimed:
            offer = ours.told.reserved.get(attempt)
            if offer is not None and offer.claim():
                claimed.add(attempt)
            if offer is None or attempt not in claimed or rng.random() < 0.3:
                ours.scheduler.kv_begun(AttemptId(attempt))
            return
        if chunks[-1].last:
            read.add(attempt)
            arrive(ours, attempt)
            owner.scheduler.release(AttemptId(attempt))

    for _ in range(3000):
        for target, ask in submits[: rng.choice([0, 1, 4])]:
            submits.remove((target, ask))
            target.submit(ask)
        for attempt in rng.sample(list(asked), len(asked)):
            if rng.random() < 0.5:
                read_on(attempt)
        for each in rng.sample(prefills + decodes, n_prefill + n_decode):
            each.step()
        if not submits and not any(each.scheduler.n_live for each in prefills + decodes):
            break
    else:
        raise AssertionError([each.scheduler.load() for each in prefills + decodes])
    for attempt, (ask, _, decode) in asked.items():
        assert decode.told.tokens[attempt] == continuation(ask.tokens, 20)[1:]
    for each in prefills + decodes:
        assert not each.told.failed
        each.assert_idle()
