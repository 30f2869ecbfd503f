"""serving.engine.scheduler: every path gives the same tokens, and every path gives its blocks back."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.deadline import Order
from serving.engine.base import AttemptId, FinishReason
from serving.engine.sequence import Drawn
from tests.engine_rig import EOS, PREFILL, Rig, continuation, prompt, work

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


def test_what_never_fits_fails_at_once_and_what_fills_the_pool_ends() -> None:
    rig = Rig(n_blocks=4, block_tokens=8)
    rig.submit(work(1, prompt(32)), work(2, prompt(32, salt=1), PREFILL), work(3, prompt(31, salt=2)))
    rig.run()
    assert rig.told.failed[1].message == "needs 5 KV blocks, the pool has 4"
    assert len(rig.told.chunks[2][-1].blocks) == 4  # decode needs one token more, prefill does not
    rig.scheduler.release(AttemptId(2))
    rig.run()
    # 31 tokens fit, the second generated one does not: an answer that is as long as it can be.
    assert (rig.told.finished[3].reason, len(rig.told.tokens[3])) == (FinishReason.LENGTH, 2)
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


def test_a_runner_that_draws_too_little_is_an_error() -> None:
    rig = Rig()
    rig.submit(work(1, prompt(5)))
    plan = rig.scheduler.schedule()
    with pytest.raises(ValueError, match="0 tokens drawn for 1 sequences"):
        rig.scheduler.apply(plan, Drawn([]))


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
