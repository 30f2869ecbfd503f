"""serving.engine.scheduler: prefill and decode apart, with the KV handed over between them."""

from __future__ import annotations

from array import array

import pytest

from serving.engine.base import AttemptId
from tests.engine_rig import DECODE, EOS, PREFILL, Rig, continuation, hand_over, prompt, work


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
