"""serving.engine.scheduler: every path gives the same tokens, and every path gives its blocks back."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.deadline import Order
from serving.engine.base import AttemptId, FinishReason, Mode
from serving.engine.sequence import Drawn
from tests.engine_rig import EOS, Rig, continuation, prompt, work

PREFILL, DECODE, LOCAL = Mode.PREFILL, Mode.DECODE, Mode.LOCAL


def hand_over(source: Rig, target: Rig, attempt: int) -> None:
    """What the two roles do between PREFILL's last chunk and DECODE's first step."""
    chunks = source.told.chunks[attempt]
    theirs = [block for chunk in chunks for block in chunk.blocks]
    ours = target.told.reserved[attempt]
    assert len(theirs) == len(ours.blocks)
    target.runner.copy(source.runner, list(zip(theirs, ours.blocks, strict=True))[ours.n_cached :])
    source.scheduler.release(AttemptId(attempt))
    token = chunks[-1].token
    assert token is not None
    target.scheduler.kv_arrived(AttemptId(attempt), token)


# ---------------------------------------------------------------- one engine


def test_local_answers_like_the_model() -> None:
    rig = Rig()
    rig.submit(*(work(i, prompt(10 + 9 * i, salt=i), max_tokens=20) for i in range(6)))
    rig.run()
    for i in range(6):
        assert rig.told.tokens[i] == continuation(prompt(10 + 9 * i, salt=i), 20)
        assert rig.told.finished[i].reason is FinishReason.LENGTH
    rig.assert_idle()


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        # 1 decode + 15 of 50; the last 5 of it share a step with the third prompt.
        pytest.param(Order.FIFO, [16, 16, 16, 14, 3, 3], id="fifo"),
        # 1 decode + 8 of the third prompt + 7 of 50; then two decodes, until the third request ends.
        pytest.param(Order.DEADLINE, [16, 16, 16, 16, 2, 2], id="deadline"),
    ],
)
def test_chunks_keep_the_budget_and_decodes_go_first(order: Order, expected: list[int]) -> None:
    rig = Rig(chunk_tokens=16, order=order)
    rig.submit(work(1, prompt(9), max_tokens=30))
    rig.step()
    rig.submit(work(2, prompt(50, salt=2)), work(3, prompt(8, salt=3)))
    sizes = []
    for _ in range(6):
        output = rig.step()
        assert AttemptId(1) in output.attempts  # no prompt holds a decode up
        sizes.append(output.load.batch_tokens)
    assert sizes == expected
    rig.run()
    assert rig.runner.largest_step == 16
    rig.assert_idle()


def test_the_load_tells_what_a_step_decoded() -> None:
    """Sequences, and the tokens whose KV they hold; nothing of a step that computed a prompt as well."""
    rig = Rig(chunk_tokens=16)
    rig.submit(work(1, prompt(9), max_tokens=30), work(2, prompt(5, salt=2), max_tokens=30))
    rig.step()
    assert rig.step().load.decoded == (2, 10 + 6)
    assert rig.step().load.decoded == (2, 11 + 7)
    rig.submit(work(3, prompt(40, salt=3)))
    assert rig.step().load.decoded == (0, 0)


def test_max_batch_is_kept() -> None:
    rig = Rig(max_batch=3)
    rig.submit(*(work(i, prompt(5, salt=i), max_tokens=6) for i in range(8)))
    while rig.scheduler.runnable:
        assert rig.step().load.running <= 3
    assert len(rig.told.finished) == 8
    rig.assert_idle()


@pytest.mark.parametrize("size", [8, 16])
def test_full_hit_at_block_edge(size: int) -> None:
    """Prompts of 15..129 tokens, each twice: same answer, at least the last token is recomputed."""
    for n_tokens in range(15, 130):
        rig = Rig(block_tokens=size)
        for attempt in (1, 2):
            rig.submit(work(attempt, prompt(n_tokens)))
            rig.run()
        first, second = rig.told.started[1].n_cached, rig.told.started[2].n_cached
        assert first == 0
        assert second == (n_tokens - 1) // size * size  # cached_within_prompt
        assert rig.told.tokens[1] == rig.told.tokens[2] == continuation(prompt(n_tokens), 4)
        assert rig.counters.prompt_tokens_computed == 2 * n_tokens - second
        rig.assert_idle()


def test_repeat_prompt_hits_generated_blocks() -> None:
    """The next turn of a chat finds the answer of the last one, not only its prompt."""
    rig = Rig(block_tokens=8)
    rig.submit(work(1, prompt(20), max_tokens=30))
    rig.run()
    turn = prompt(20) + array("I", rig.told.tokens[1]) + prompt(5, salt=9)
    rig.submit(work(2, turn))
    rig.run()
    assert rig.told.started[2].n_cached == 48  # 49 of the 50 tokens have KV
    assert rig.told.tokens[2] == continuation(turn, 4)


def test_shared_prefix_no_bleed() -> None:
    head = prompt(40)
    tails = [head + prompt(10, salt=i) for i in (1, 2, 3)]
    rig = Rig()
    rig.submit(*(work(i, tokens, max_tokens=12) for i, tokens in enumerate(tails)))
    rig.run()
    rig.submit(*(work(10 + i, tokens, max_tokens=12) for i, tokens in enumerate(tails)))
    rig.run()
    for i, tokens in enumerate(tails):
        assert rig.told.tokens[i] == rig.told.tokens[10 + i] == continuation(tokens, 12)


def test_salt_isolates() -> None:
    rig = Rig()
    for attempt, namespace in ((1, 1), (2, 1), (3, 2)):
        rig.submit(work(attempt, prompt(40), namespace=namespace))
        rig.run()
    assert [rig.told.started[i].n_cached for i in (1, 2, 3)] == [0, 32, 0]


# ---------------------------------------------------------------- ends


@pytest.mark.parametrize(
    ("drawn", "params", "told", "reason"),
    [
        pytest.param([], {"max_tokens": 1}, 1, FinishReason.LENGTH, id="max_tokens_one_exact"),
        pytest.param([EOS], {}, 1, FinishReason.STOP, id="eos_first"),
        pytest.param([5, EOS], {}, 2, FinishReason.STOP, id="eos"),
        pytest.param([5, EOS, 6], {"ignore_eos": True}, 4, FinishReason.LENGTH, id="ignore_eos"),
        pytest.param([5, 9], {"stop_token_ids": (9,)}, 2, FinishReason.STOP, id="stop_token"),
        pytest.param([5, 5, 5, EOS], {}, 4, FinishReason.STOP, id="eos_at_max_tokens"),
    ],
)
def test_finish(drawn: list[int], params: dict[str, object], told: int, reason: FinishReason) -> None:
    rig = Rig()
    rig.runner.scripted[1] = drawn
    rig.submit(work(1, prompt(12), **params))  # type: ignore[arg-type]
    rig.run()
    assert len(rig.told.tokens[1]) == told
    assert rig.told.finished[1].reason is reason
    rig.assert_idle()


def test_context_ends_the_answer() -> None:
    rig = Rig(context_tokens=20)
    rig.submit(work(1, prompt(12), max_tokens=100), work(2, prompt(20)), work(3, prompt(19), max_tokens=5))
    rig.run()
    assert len(rig.told.tokens[1]) == 8
    assert rig.told.finished[1].reason is FinishReason.LENGTH
    assert "context of 20" in rig.told.failed[2].message
    assert len(rig.told.tokens[3]) == 1
    rig.assert_idle()


def test_what_never_fits_fails_at_once() -> None:
    rig = Rig(n_blocks=4, block_tokens=8)
    rig.submit(work(1, prompt(32)), work(2, prompt(32, salt=1), PREFILL), work(3, prompt(31, salt=2)))
    rig.run()
    assert rig.told.failed[1].message == "needs 5 KV blocks, the pool has 4"
    assert len(rig.told.chunks[2][-1].blocks) == 4  # decode needs one token more, prefill does not
    rig.scheduler.release(AttemptId(2))
    rig.run()
    # 31 tokens fit, the second generated one does not.
    assert "the pool has 4" in rig.told.failed[3].message
    rig.assert_idle()


def test_resume_goes_on_as_if_nothing_had_happened() -> None:
    whole = continuation(prompt(30), 12)
    rig = Rig()
    rig.submit(work(1, prompt(30) + array("I", whole[:5]), max_tokens=12, n_prompt=30))
    rig.run()
    assert rig.told.first[1] == 5
    assert rig.told.tokens[1] == whole[5:]


def test_a_resume_of_all_tokens_ends() -> None:
    rig = Rig()
    rig.submit(work(1, prompt(30), max_tokens=5, n_prompt=25))
    rig.run()
    assert rig.told.finished[1].reason is FinishReason.LENGTH
    assert 1 not in rig.told.tokens


# ---------------------------------------------------------------- too few blocks


def test_decode_oom_requeue() -> None:
    """Two requests that do not fit together: the newer one steps back, both end with the right tokens."""
    rig = Rig(n_blocks=8, block_tokens=8)
    rig.submit(work(1, prompt(20), max_tokens=40), work(2, prompt(20, salt=1), max_tokens=40))
    rig.run()
    assert rig.counters.preemptions > 0
    assert rig.told.tokens[1] == continuation(prompt(20), 40)
    assert rig.told.tokens[2] == continuation(prompt(20, salt=1), 40)
    rig.assert_idle()


def test_preempted_waits_for_leases() -> None:
    rig = Rig(n_blocks=6, block_tokens=8)
    rig.submit(work(1, prompt(30, salt=1), PREFILL))
    rig.run()
    rig.submit(work(2, prompt(10), max_tokens=20))
    rig.run()
    assert rig.scheduler.n_live == 1  # preempted itself: nothing else to take blocks from
    assert not rig.scheduler.load().runnable
    rig.scheduler.release(AttemptId(1))
    assert rig.scheduler.load().runnable
    rig.run()
    assert rig.told.tokens[2] == continuation(prompt(10), 20)
    rig.assert_idle()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_half_done_prompts_never_block_each_other(seed: int) -> None:
    """A pool of 1.5 longest prompts, random arrivals and cancels: all that stay end, with their tokens."""
    rng = random.Random(seed)
    longest, size = 60, 8
    rig = Rig(n_blocks=longest * 3 // 2 // size, block_tokens=size, chunk_tokens=rng.choice([8, 16, 48]))
    cancelled: set[int] = set()
    prompts = {i: prompt(rng.randrange(1, longest - 20), salt=rng.randrange(4)) for i in range(25)}
    due = list(prompts)
    while due or rig.scheduler.runnable:
        for attempt in due[: rng.randrange(4)]:
            due.remove(attempt)
            rig.submit(work(attempt, prompts[attempt], max_tokens=20))
            if rng.random() < 0.15:
                cancelled.add(attempt)
        victim = rng.choice(sorted(cancelled)) if cancelled else None
        if victim is not None and rng.random() < 0.3:
            rig.scheduler.cancel(AttemptId(victim))
        rig.step()
    for attempt in cancelled:
        rig.scheduler.cancel(AttemptId(attempt))
    for attempt in prompts.keys() - cancelled:
        assert rig.told.tokens[attempt] == continuation(prompts[attempt], 20)
    rig.assert_idle()


# ---------------------------------------------------------------- prefill and decode apart


def test_large_prompt_over_chunk() -> None:
    """3 chunks and a token: every block is announced once, in order, and stays until the release."""
    rig = Rig(chunk_tokens=16, block_tokens=8)
    rig.submit(work(1, prompt(49), PREFILL))
    rig.run()
    chunks = rig.told.chunks[1]
    assert [(c.first, len(c.blocks), c.last) for c in chunks] == [
        (0, 2, False),
        (2, 2, False),
        (4, 2, False),
        (6, 1, True),
    ]
    assert chunks[-1].token == rig.told.tokens[1][0] == continuation(prompt(49), 1)[0]
    assert len({block for chunk in chunks for block in chunk.blocks}) == 7
    assert rig.pool.states().leased == 7
    rig.scheduler.release(AttemptId(1))
    rig.scheduler.release(AttemptId(1))
    rig.assert_idle()


def test_cached_blocks_are_announced_too() -> None:
    rig = Rig(chunk_tokens=16, block_tokens=8)
    for attempt in (1, 2):
        rig.submit(work(attempt, prompt(49), PREFILL))
        rig.run()
    assert [(c.first, len(c.blocks)) for c in rig.told.chunks[2]] == [(0, 7)]
    assert rig.pool.states().leased == 8  # six shared, and each prompt's partial last block


@pytest.mark.parametrize("case", ["max_tokens", "eos"])
def test_prefill_end_skips_decode(case: str) -> None:
    rig = Rig()
    rig.runner.scripted[1] = [EOS] if case == "eos" else []
    rig.submit(work(1, prompt(30), PREFILL, max_tokens=1 if case == "max_tokens" else 9))
    rig.run()
    last = rig.told.chunks[1][-1]
    assert (last.last, last.token, last.blocks) == (True, None, [])
    assert 1 in rig.told.finished
    assert len(rig.told.tokens[1]) == 1
    rig.assert_idle()


def test_release_before_the_prompt_is_done_leaves_no_lease() -> None:
    rig = Rig(chunk_tokens=8)
    rig.submit(work(1, prompt(30), PREFILL))
    rig.step()
    rig.scheduler.release(AttemptId(1))
    rig.run()
    assert len(rig.told.tokens[1]) == 1
    assert rig.told.chunks[1][-1].last
    rig.assert_idle()


@pytest.mark.parametrize("n_tokens", [1, 7, 8, 9, 31, 32, 33])
def test_decode_does_not_prefill(n_tokens: int) -> None:
    source, target = Rig(), Rig()
    source.submit(work(1, prompt(n_tokens), PREFILL, max_tokens=20))
    target.submit(work(1, prompt(n_tokens), DECODE, max_tokens=20))
    source.run()
    target.run()
    assert target.told.reserved[1].n_cached == 0
    hand_over(source, target, 1)
    target.run()
    assert target.counters.prompt_tokens_computed == 0
    assert target.told.first[1] == 1  # position 0 was prefill's to tell
    assert source.told.tokens[1] + target.told.tokens[1] == continuation(prompt(n_tokens), 20)
    source.assert_idle()
    target.assert_idle()


def test_transferred_blocks_indexed_and_skipped_next_time() -> None:
    source, target = Rig(), Rig()
    for attempt, n_cached in ((1, 0), (2, 4)):
        source.submit(work(attempt, prompt(32), PREFILL, max_tokens=9))
        target.submit(work(attempt, prompt(32), DECODE, max_tokens=9))
        source.run()
        target.run()
        assert target.told.reserved[attempt].n_cached == n_cached
        hand_over(source, target, attempt)
        target.run()
    assert target.told.tokens[1] == target.told.tokens[2]
    assert target.counters.prompt_tokens_computed == 0


def test_decode_resumes_a_resumed_request() -> None:
    whole = continuation(prompt(30), 12)
    text = prompt(30) + array("I", whole[:5])
    source, target = Rig(), Rig()
    for rig, mode in ((source, PREFILL), (target, DECODE)):
        rig.submit(work(1, text, mode, max_tokens=12, n_prompt=30))
        rig.run()
    hand_over(source, target, 1)
    target.run()
    assert (source.told.first[1], target.told.first[1]) == (5, 6)
    assert source.told.tokens[1] + target.told.tokens[1] == whole[5:]


def test_preempted_decode_computes_its_prompt_itself() -> None:
    source, target = Rig(), Rig(n_blocks=8)
    for attempt in (1, 2):
        source.submit(work(attempt, prompt(20, salt=attempt), PREFILL, max_tokens=40))
        target.submit(work(attempt, prompt(20, salt=attempt), DECODE, max_tokens=40))
    source.run()
    target.run()
    for attempt in (1, 2):
        hand_over(source, target, attempt)
    target.run()
    assert target.counters.preemptions > 0
    for attempt in (1, 2):
        expected = continuation(prompt(20, salt=attempt), 40)
        assert source.told.tokens[attempt] + target.told.tokens[attempt] == expected
    target.assert_idle()


def test_kv_arrived_twice_or_unknown_is_ignored() -> None:
    rig = Rig()
    rig.submit(work(1, prompt(10), DECODE, max_tokens=3))
    rig.run()
    rig.scheduler.kv_arrived(AttemptId(9), 5)
    sequence = rig.scheduler.reserved(AttemptId(1))
    assert sequence is not None
    rig.runner.write(sequence, 0, 10)
    for _ in range(2):
        rig.scheduler.kv_arrived(AttemptId(1), 5)
    rig.run()
    assert len(rig.told.tokens[1]) == 2
    rig.assert_idle()


# ---------------------------------------------------------------- cancel in every state


def _waiting(rig: Rig) -> None:
    rig.submit(work(8, prompt(200)), work(1, prompt(300, salt=1)))
    rig.step()
    assert 1 not in rig.told.started


def _prefill(rig: Rig) -> None:
    rig.submit(work(1, prompt(200)))
    rig.step()


def _prefill_announced(rig: Rig) -> None:
    rig.submit(work(1, prompt(200), PREFILL))
    rig.step()
    assert rig.told.chunks[1]


def _decode(rig: Rig) -> None:
    rig.submit(work(1, prompt(20), max_tokens=50))
    for _ in range(5):
        rig.step()


def _leased(rig: Rig) -> None:
    rig.submit(work(1, prompt(20), PREFILL))
    rig.run()
    assert rig.pool.is_leased(AttemptId(1))


def _reserved(rig: Rig) -> None:
    rig.submit(work(1, prompt(20), DECODE))
    rig.run()


def _transferred(rig: Rig) -> None:
    """The KV is here and all places in the batch are taken."""
    rig.submit(*(work(10 + i, prompt(5, salt=i), max_tokens=50) for i in range(4)))
    rig.step()
    rig.submit(work(1, prompt(20), DECODE))
    rig.step()
    rig.scheduler.kv_arrived(AttemptId(1), 5)
    rig.step()
    assert rig.scheduler.load().waiting == 1


def _retracted(rig: Rig) -> None:
    rig.submit(work(10, prompt(100), max_tokens=200), work(1, prompt(180, salt=1), max_tokens=200))
    while not rig.counters.preemptions:
        rig.step()
    assert rig.scheduler.load().waiting == 1


STATES = [
    pytest.param(_waiting, id="waiting"),
    pytest.param(_prefill, id="prefill"),
    pytest.param(_prefill_announced, id="prefill_announced"),
    pytest.param(_decode, id="decode"),
    pytest.param(_leased, id="leased"),
    pytest.param(_reserved, id="reserved"),
    pytest.param(_transferred, id="queued_transferred_abort"),
    pytest.param(_retracted, id="retracted_abort_host_memory"),
]


@pytest.mark.parametrize("quarantine", [False, True])
@pytest.mark.parametrize("reach", STATES)
def test_abort_in_every_state_frees(reach: object, quarantine: bool) -> None:
    rig = Rig(n_blocks=40, block_tokens=8, max_batch=4)
    reach(rig)  # type: ignore[operator]
    n_told = len(rig.told.tokens.get(1, []))
    for _ in range(2):
        rig.scheduler.cancel(AttemptId(1), quarantine)
    rig.run()
    assert len(rig.told.tokens.get(1, [])) == n_told
    assert 1 not in rig.told.finished
    assert 1 not in rig.told.failed
    rig.scheduler.pool.end_quarantine(AttemptId(1))
    rig.assert_idle()


def test_quarantine_parks_what_a_read_may_still_write() -> None:
    rig = Rig(n_blocks=8)
    rig.submit(work(1, prompt(20)))
    rig.run()
    rig.submit(work(2, prompt(33), DECODE))
    rig.run()
    assert rig.told.reserved[2].n_cached == 2
    rig.scheduler.cancel(AttemptId(2), quarantine=True)
    assert rig.pool.states().quarantined == 3
    rig.submit(work(3, prompt(40, salt=5)))
    rig.run()
    assert 3 not in rig.told.started  # 6 blocks wanted, 5 left
    rig.pool.end_quarantine(AttemptId(2))
    rig.run()
    assert rig.told.tokens[3] == continuation(prompt(40, salt=5), 4)
    rig.assert_idle()


def test_fail_all_tells_every_live_attempt() -> None:
    rig = Rig(max_batch=2)
    rig.submit(work(9, prompt(9), PREFILL))
    rig.run()
    modes = (LOCAL, PREFILL, DECODE, LOCAL)
    rig.submit(*(work(i, prompt(20 + i * 90, salt=i), mode) for i, mode in enumerate(modes)))
    rig.step()
    rig.scheduler.fail_all("gone")
    rig.step()
    assert set(rig.told.failed) == {0, 1, 2, 3}
    assert rig.pool.states().leased == 2  # a reader may still be at it
    assert rig.pool.states().quarantined == 26  # a read may still write to them
    rig.scheduler.release(AttemptId(9))
    rig.pool.end_quarantine(AttemptId(2))
    rig.assert_idle()


def test_a_runner_that_draws_too_little_is_an_error() -> None:
    rig = Rig()
    rig.submit(work(1, prompt(5)))
    plan = rig.scheduler.schedule()
    with pytest.raises(ValueError, match="0 tokens drawn for 1 sequences"):
        rig.scheduler.apply(plan, Drawn([]))
