"""serving.engine.prefill_order and prompt_queue: who computes first, who gives back, all get done."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.deadline import LONGEST_MS, SLACK_MS, Order
from kvrouter.perf_model import PREFILL_REACH, LinearModel, PrefillModel
from serving.engine.base import AttemptId, Mode, Work
from serving.engine.prefill_order import FEWEST_SAMPLES, PrefillOrder
from serving.engine.sequence import PrefillSlice, Sequence, StepPlan
from tests.engine_rig import DECODE, LOCAL, PREFILL, Rig, arrive, continuation, prompt, work


def first_tokens(rig: Rig) -> list[int]:
    """Attempts, in the order in which their prompts were done."""
    return list(rig.told.tokens)


def one_token(
    attempt: int, n_tokens: int, mode: Mode = LOCAL, priority: int = 0, waited_s: float = 0.0
) -> Work:
    asked = work(attempt, prompt(n_tokens, salt=attempt), mode, max_tokens=1, priority=priority)
    return replace(asked, waited_s=waited_s)


# ---------------------------------------------------------------- due times


@pytest.mark.parametrize(
    ("priority", "slack_ms"),
    [
        (0, 2000),
        (1, 1000),
        (2, 500),
        (10, SLACK_MS / 1024),
        (99, SLACK_MS / 1024),
        (-1, 4000),
        (-99, 64_000),
    ],
)
def test_priority_sets_the_slack(priority: int, slack_ms: float) -> None:
    deadline = PrefillOrder(Order.DEADLINE, 512)
    assert deadline.due_s(priority, 0, 900, 50.0) == pytest.approx(50 + slack_ms / 1e3)
    assert PrefillOrder(Order.FIFO, 512).due_s(priority, 900, 900, 50.0) == 50.0


def step_of(*slices: tuple[int, int], decodes: int = 0) -> StepPlan:
    def sequence(n_tokens: int) -> Sequence:
        return Sequence(work(0, prompt(1)), array("I", bytes(4 * n_tokens)))

    pieces = [PrefillSlice(sequence(start + count), start, count) for start, count in slices]
    return StepPlan([sequence(1)] * decodes, pieces)


def test_the_own_time_is_learnt_from_steps() -> None:
    """Chunks of 512 at 3 ms + 0.2 ms a token + attention teach what prompts of any length take."""

    def true_ms(start: int, count: int) -> float:
        return 3 + 0.2 * count + 1e-5 * count * (start + count / 2)

    order = PrefillOrder(Order.DEADLINE, 512)
    prior_ms = order.predict_ms(4096, 4096)
    assert prior_ms == 8 * 1.0 + 4096 * 0.05  # PrefillModel's prior
    for n_samples in range(200):
        if n_samples == FEWEST_SAMPLES - 1:
            assert order.predict_ms(4096, 4096) == prior_ms
        start, count = n_samples % 8 * 512, (512, 130, 300)[n_samples % 3]
        order.learn(step_of((start, count)), true_ms(start, count))
    whole_ms = sum(true_ms(start, 512) for start in range(0, 4096, 512))
    assert order.predict_ms(4096, 4096) == pytest.approx(whole_ms, rel=0.1)
    assert order.predict_ms(0, 4096) == 0


@pytest.mark.parametrize("ms", [0.0, 1e-6, 1e-3])
def test_an_engine_that_takes_no_time_is_no_trouble(ms: float) -> None:
    order = PrefillOrder(Order.DEADLINE, 512)
    for _ in range(50):
        order.learn(step_of((0, 512)), ms)
        order.learn(step_of((0, 8), decodes=200), 30.0)  # tells of decodes: left out
        order.learn(step_of(decodes=3), 30.0)
    assert 10.0 <= order.due_s(0, 100_000, 100_000, 10.0) <= 10 + (SLACK_MS + LONGEST_MS) / 1e3
    if ms:
        assert order.predict_ms(512, 512) < 0.1


def test_a_calibration_is_where_it_starts() -> None:
    order = PrefillOrder(Order.DEADLINE, 512, PrefillModel(LinearModel((0.0, 1.0, 0.0), PREFILL_REACH)))
    assert order.due_s(0, 100, 400, 0.0) == pytest.approx(2.1)


# ---------------------------------------------------------------- chunk borders


@pytest.mark.parametrize(
    ("order", "second", "expected"),
    [
        pytest.param(Order.DEADLINE, one_token(2, 20), [2, 1], id="short_overtakes"),
        pytest.param(Order.DEADLINE, one_token(2, 600), [1, 2], id="longer_waits"),
        pytest.param(Order.DEADLINE, one_token(2, 600, priority=1), [2, 1], id="priority_overtakes"),
        pytest.param(Order.DEADLINE, one_token(2, 20, priority=-1), [1, 2], id="background_waits"),
        pytest.param(Order.DEADLINE, one_token(2, 600, waited_s=5.0), [2, 1], id="older_overtakes"),
        pytest.param(Order.FIFO, one_token(2, 600, waited_s=5.0), [2, 1], id="fifo_older_overtakes"),
        pytest.param(Order.FIFO, one_token(2, 20), [1, 2], id="fifo"),
        pytest.param(Order.FIFO, one_token(2, 20, priority=5), [1, 2], id="fifo_knows_no_priority"),
    ],
)
@pytest.mark.parametrize("max_batch", [1, 8])
@pytest.mark.parametrize("mode", [LOCAL, PREFILL])
def test_overtaking_at_a_chunk_border(
    order: Order, second: Work, expected: list[int], max_batch: int, mode: Mode
) -> None:
    """The second comes when the first, of 400 tokens, is at its third chunk of 32."""
    rig = Rig(n_blocks=200, chunk_tokens=32, order=order, step_s=0.001, max_batch=max_batch)
    rig.submit(one_token(1, 400, mode))
    for _ in range(3):
        rig.step()
    rig.submit(second)
    output = rig.step()
    assert rig.scheduler.load().running == 1 + (expected[0] == 2 and len(second.tokens) > 32)
    assert output.load.batch_tokens == 32 if max_batch > 1 else 20
    rig.run()
    assert first_tokens(rig) == expected
    assert rig.counters.prompt_tokens_computed == 400 + len(second.tokens)  # nothing twice
    rig.assert_idle()


def test_waiting_prompts_find_what_was_computed_before_them() -> None:
    """A prompt starts when it is its turn, not before: then it finds the prefix it shares."""
    rig = Rig(chunk_tokens=16)
    head = prompt(64)
    rig.submit(*(work(i, head + prompt(6, salt=i), max_tokens=1) for i in range(1, 4)))
    rig.run()
    assert [rig.told.started[i].n_cached for i in (1, 2, 3)] == [0, 64, 64]


def test_nobody_starves() -> None:
    """Short prompts come faster than they are computed. They overtake the long one for as long as its own
    time postpones it, and no more."""
    rig = Rig(n_blocks=600, chunk_tokens=32, step_s=0.01)
    rig.submit(one_token(0, 3000))
    own_s = PrefillOrder(Order.DEADLINE, 32).predict_ms(3000, 3000) / 1e3
    short_s = PrefillOrder(Order.DEADLINE, 32).predict_ms(36, 36) / 1e3
    for attempt in range(1, 400):
        rig.submit(one_token(attempt, 36))
        rig.step()
        if 0 in rig.told.tokens:
            break
    assert first_tokens(rig)[-1] == 0
    assert len(first_tokens(rig)) - 1 == pytest.approx((own_s - short_s) / rig.step_s, abs=1)
    rig.run()
    rig.assert_idle()


@pytest.mark.parametrize(
    ("priority", "expected"),
    [pytest.param(1, [9, 1, 2, 3], id="due_before"), pytest.param(0, [1, 2, 3, 9], id="due_after")],
)
def test_places_go_by_due_time_to_prompts_and_transfers(priority: int, expected: list[int]) -> None:
    """One place in the batch, transfers that are ready for it, and a prompt."""
    rig = Rig(max_batch=1)
    rig.submit(*(work(i, prompt(10, salt=i), DECODE, max_tokens=5) for i in (1, 2, 3)))
    rig.step()
    for attempt in (1, 2, 3):
        arrive(rig, attempt)
    rig.submit(work(9, prompt(10, salt=9), priority=priority, max_tokens=2))
    rig.run()
    assert list(rig.told.finished) == expected
    rig.assert_idle()


@pytest.mark.parametrize("mode", [LOCAL, DECODE])
def test_nobody_takes_what_gathers_for_an_earlier_one(mode: Mode) -> None:
    """While a large prompt waits for a lease to end, small ones after it do not take the blocks left."""
    rig = Rig(n_blocks=20)
    rig.submit(work(1, prompt(70), PREFILL))
    rig.run()
    rig.submit(one_token(2, 100))  # 13 blocks, 11 are left
    rig.step()
    rig.submit(work(3, prompt(20, salt=3), mode, priority=-1))
    rig.run()
    assert not rig.told.reserved
    assert list(rig.told.started) == [1]
    rig.scheduler.release(AttemptId(1))
    rig.run()
    assert list(rig.told.started)[:2] == [1, 2]
    assert (3 in rig.told.reserved) == (mode is DECODE)
    assert (3 in rig.told.started) == (mode is LOCAL)


# ---------------------------------------------------------------- giving back


def parked(rig: Rig, *sizes: int, mode: Mode, steps: int = 2) -> None:
    """Prompts 1, 2, ..., each shorter than the one before and begun before the next comes."""
    for attempt, size in enumerate(sizes, start=1):
        rig.submit(one_token(attempt, size, mode))
        for _ in range(steps):
            rig.step()
    assert rig.scheduler.load().running == len(sizes)


def test_the_latest_gives_back_and_finds_it_again() -> None:
    rig = Rig(n_blocks=40, chunk_tokens=16, step_s=0.001)
    parked(rig, 200, 80, mode=LOCAL)  # 26 + 11 blocks
    rig.submit(one_token(3, 40))  # 6 blocks, 3 left
    assert rig.scheduler.load().waiting_tokens == 200 + 80 + 40 - 4 * 16
    output = rig.step()
    assert rig.counters.preemptions == 1
    assert (output.load.running, output.load.waiting) == (2, 1)
    assert output.load.waiting_tokens == 200 + 80 + 40 - 5 * 16  # what the latest computed is still there
    rig.run()
    assert first_tokens(rig) == [3, 2, 1]
    assert rig.counters.prompt_tokens_computed == 320
    assert rig.told.started[1].n_cached == 0  # told once
    rig.assert_idle()


def test_no_more_give_back_than_needed_and_the_latest_first() -> None:
    rig = Rig(n_blocks=60, chunk_tokens=16, step_s=0.001)
    parked(rig, 200, 150, 100, mode=LOCAL)  # 26 + 19 + 13 blocks
    rig.submit(one_token(4, 60))  # 8, 2 are left
    rig.step()
    assert rig.counters.preemptions == 1
    rig.run()
    assert first_tokens(rig) == [4, 3, 2, 1]
    rig.assert_idle()


def test_nobody_gives_back_in_vain() -> None:
    """A lease holds the rest: the blocks of the later one would not do, so it goes on."""
    rig = Rig(n_blocks=40, chunk_tokens=16, step_s=0.001)
    rig.submit(one_token(1, 8), work(2, prompt(120, salt=2), PREFILL))
    rig.run()
    assert rig.pool.states().leased == 15
    rig.submit(one_token(3, 180, priority=-1))  # 23 of the 25 that are left
    rig.step()
    rig.submit(one_token(4, 210))  # 27
    rig.run()
    assert first_tokens(rig) == [1, 2, 3]
    assert rig.counters.preemptions == 0
    assert not rig.scheduler.load().runnable
    rig.scheduler.release(AttemptId(2))
    rig.run()
    assert first_tokens(rig) == [1, 2, 3, 4]
    rig.assert_idle()


def test_fifo_gives_nothing_back() -> None:
    rig = Rig(n_blocks=40, chunk_tokens=16, order=Order.FIFO)
    rig.submit(one_token(1, 200))
    rig.step()
    rig.submit(one_token(2, 150))
    rig.submit(one_token(3, 8))
    rig.run()
    assert first_tokens(rig) == [1, 2, 3]
    assert rig.counters.preemptions == 0


def test_a_prompt_that_a_reader_was_told_of_gives_nothing_back() -> None:
    """Four chunks of 16 are told: it computes on, an earlier one waits until it was read."""
    rig = Rig(n_blocks=30, chunk_tokens=16, step_s=0.001)
    long = work(1, prompt(200, salt=1), PREFILL)
    rig.submit(long)
    for _ in range(4):
        rig.step()
    rig.submit(one_token(2, 150))  # 19 blocks, 5 left
    rig.run()
    assert first_tokens(rig) == [1]
    assert rig.counters.preemptions == 0
    blocks = [block for chunk in rig.told.chunks[1] for block in chunk.blocks]
    assert rig.runner.holds(long.tokens, 0, blocks)
    assert rig.pool.states().leased == len(set(blocks)) == 25
    rig.scheduler.release(AttemptId(1))
    rig.run()
    assert first_tokens(rig) == [1, 2]
    assert rig.counters.prompt_tokens_computed == 350
    rig.assert_idle()


def test_a_told_prompt_passes_one_that_waits_for_its_blocks() -> None:
    """A decode grew and found no room; it does not fit beside what is announced: that must end first."""
    rig = Rig(n_blocks=10, chunk_tokens=8, step_s=0.001)
    rig.submit(work(1, prompt(64, salt=1), PREFILL, priority=-2))  # 8 blocks
    for _ in range(5):
        rig.step()
    rig.submit(work(2, prompt(10, salt=2), max_tokens=40))  # 2 blocks, later 7
    rig.run()
    assert rig.told.chunks[1][-1].last
    assert 2 not in rig.told.finished
    rig.scheduler.release(AttemptId(1))
    rig.run()
    assert rig.told.tokens[2] == continuation(prompt(10, salt=2), 40)
    rig.assert_idle()


def test_a_preempted_decode_comes_first() -> None:
    """Its client waits for the next token: even a prompt that was due before it gets its place after it."""
    rig = Rig(n_blocks=8, step_s=0.001)
    rig.submit(*(work(i, prompt(20, salt=i), max_tokens=40) for i in (1, 2)))
    while not rig.counters.preemptions:
        rig.step()
    n_told = len(rig.told.tokens[2])
    rig.submit(work(3, prompt(20, salt=3), max_tokens=1, priority=5))
    while 3 not in rig.told.tokens:
        rig.step()
    assert len(rig.told.tokens[2]) > n_told
    rig.run()
    assert rig.told.tokens[2] == continuation(prompt(20, salt=2), 40)
    rig.assert_idle()


def test_room_for_a_transfer_is_taken_from_later_prompts() -> None:
    rig = Rig(n_blocks=30, chunk_tokens=16, step_s=0.001)
    parked(rig, 200, mode=LOCAL)
    rig.submit(work(2, prompt(100, salt=2), DECODE))
    rig.step()
    assert 2 not in rig.told.reserved  # nobody has it yet
    rig.scheduler.kv_begun(AttemptId(2))
    rig.step()
    assert len(rig.told.reserved[2].blocks) == 13
    assert rig.counters.preemptions == 1
    arrive(rig, 2)
    rig.run()
    assert set(rig.told.finished) == {1, 2}
    rig.assert_idle()


# ---------------------------------------------------------------- what is still to compute


def test_waiting_tokens_are_those_to_compute() -> None:
    rig = Rig(chunk_tokens=16, n_blocks=100)
    rig.submit(work(1, prompt(80), max_tokens=1))
    rig.run()
    rig.submit(
        work(2, prompt(80) + prompt(20, salt=2), max_tokens=1),
        one_token(3, 50),
        work(4, prompt(90), DECODE),
    )
    assert rig.scheduler.load().waiting_tokens == 20 + 50
    left = [rig.step().load.waiting_tokens for _ in range(5)]
    assert left == [54, 38, 22, 6, 0]
    rig.scheduler.cancel(AttemptId(4))
    rig.run()
    rig.assert_idle()


# ---------------------------------------------------------------- all of it at once


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([*Order]))
def test_all_get_done_in_a_small_pool(seed: int, order: Order) -> None:
    """A pool of 1.5 longest requests; arrivals, modes, priorities, cancels, late readers and transfers at
    random. Blocks are conserved at every step (Rig), announced ones keep their content until the release,
    and all that are not cancelled end with their tokens."""
    rng = random.Random(seed)
    longest, size = 80, 8
    rig = Rig(
        n_blocks=longest * 3 // 2 // size,
        block_tokens=size,
        chunk_tokens=rng.choice([8, 12, 40]),
        max_batch=rng.choice([1, 3, 16]),
        order=order,
        step_s=rng.choice([0.0, 0.001, 0.5]),
    )
    works: dict[int, Work] = {}
    for attempt in range(24):
        tokens = prompt(rng.randrange(1, longest - 20), salt=rng.randrange(4))
        mode, priority = rng.choice([LOCAL, PREFILL, PREFILL, DECODE]), rng.choice([0, 0, 0, 1, -1, 20])
        works[attempt] = work(attempt, tokens, mode, max_tokens=rng.choice([1, 20]), priority=priority)
    coming, submitted, cancelled, read, begun = list(works), set[int](), set[int](), set[int](), set[int]()

    def settle(attempt: int) -> None:
        """A reader or a transfer may be done with it."""
        chunks = rig.told.chunks.get(attempt, [])
        if chunks and chunks[-1].last:
            read.add(attempt)
            rig.scheduler.release(AttemptId(attempt))
        if works[attempt].mode is not DECODE or attempt in cancelled:
            return
        if attempt not in begun:
            begun.add(attempt)
            rig.scheduler.kv_begun(AttemptId(attempt))
        elif attempt in rig.told.reserved and rig.told.reserved[attempt].claim():
            arrive(rig, attempt)

    for _ in range(5000):
        for attempt in coming[: rng.choice([0, 0, 1, 3])]:
            coming.remove(attempt)
            submitted.add(attempt)
            rig.submit(works[attempt])
        for attempt in sorted(submitted - cancelled):
            if rng.random() < 0.02 and attempt not in rig.told.finished and attempt not in read:
                cancelled.add(attempt)
                quarantine = rng.random() < 0.3
                rig.scheduler.cancel(AttemptId(attempt), quarantine)
                if quarantine:
                    rig.pool.end_quarantine(AttemptId(attempt))
            elif rng.random() < 0.2:
                settle(attempt)
        rig.step()
        for attempt in submitted - cancelled - read - rig.told.finished.keys():
            for chunk in rig.told.chunks.get(attempt, []):
                assert rig.runner.holds(works[attempt].tokens, chunk.first, chunk.blocks)
        if not coming and rig.scheduler.n_live == 0:
            break
    else:
        raise AssertionError(f"no progress: {rig.scheduler.load()}")
    for attempt in works:
        settle(attempt)
    assert not rig.told.failed
    for attempt in works.keys() - cancelled:
        n_told = 1 if works[attempt].mode is PREFILL else works[attempt].params.max_tokens
        expected = continuation(works[attempt].tokens, n_told)
        if works[attempt].mode is DECODE:  # its first token is the prefill worker's to tell
            expected = expected[1:]
        assert rig.told.tokens.get(attempt, []) == expected
        blocks = [block for chunk in rig.told.chunks.get(attempt, []) for block in chunk.blocks]
        firsts = [chunk.first for chunk in rig.told.chunks.get(attempt, []) if chunk.blocks]
        assert len(set(blocks)) == len(blocks)
        assert firsts == sorted(set(firsts))
    rig.assert_idle()
