"""Two whole workers in one process: one reads a cached prefix of the other before it computes the rest.

The simulated engine checks every pulled byte, and its tokens follow from the prompt alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from serving.engine.base import Mode
from serving.wire import Cancel
from tests.unit.handoff_fakes import until
from tests.unit.test_worker_handoff import BLOCK_TOKENS, NEW_TOKENS, Rig


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[Rig]:
    """The prefill worker has a prompt of 100 tokens cached, answered as attempt 1."""
    rig = Rig()
    await rig.start()
    rig.submit(rig.prefill, 1, Mode.LOCAL, 100)
    await until(lambda: 1 in rig.frontend.ended)
    yield rig
    try:
        await rig.everything_is_free()
        assert rig.decode.engine.counters.content_errors == 0
    finally:
        await rig.stop()


@pytest.mark.parametrize("asked", [48, 100, 104], ids=["part", "all", "too-much"])
async def test_computes_only_what_it_did_not_pull(rig: Rig, asked: int) -> None:
    rig.submit(rig.decode, 3, Mode.LOCAL, 100, pull=rig.pull(asked))
    await until(lambda: 3 in rig.frontend.ended)
    assert rig.frontend.tokens[3] == rig.frontend.tokens[1]  # equals the local answer
    counters = rig.decode.engine.counters
    pulled = min(asked, 99) // BLOCK_TOKENS * BLOCK_TOKENS
    assert counters.prompt_tokens_computed == 100 - pulled
    assert counters.prompt_tokens_pulled == pulled
    assert counters.content_checks == pulled // BLOCK_TOKENS
    assert rig.decode.transfer.counters.blocks == pulled // BLOCK_TOKENS


async def test_pulled_blocks_are_found_and_lent_on(rig: Rig) -> None:
    rig.submit(rig.decode, 3, Mode.LOCAL, 100, pull=rig.pull(96))
    await until(lambda: 3 in rig.frontend.ended)
    computed = rig.decode.engine.counters.prompt_tokens_computed
    rig.submit(rig.decode, 5, Mode.LOCAL, 100)
    await until(lambda: 5 in rig.frontend.ended)
    assert rig.decode.engine.counters.prompt_tokens_computed - computed == 4


async def test_too_short_to_pull(rig: Rig) -> None:
    rig.submit(rig.decode, 3, Mode.LOCAL, BLOCK_TOKENS, pull=rig.pull(96))
    await until(lambda: 3 in rig.frontend.ended)
    assert rig.decode.host.reader.idle


async def test_nothing_left_to_generate(rig: Rig) -> None:
    """The engine ends it before its pull begins."""
    rig.submit(rig.decode, 3, Mode.LOCAL, 100 + NEW_TOKENS, n_prompt=100, pull=rig.pull(96))
    await until(lambda: 3 in rig.frontend.ended)
    await until(lambda: rig.decode.host.reader.idle, 1)


async def test_pull_then_hand_off(rig: Rig) -> None:
    """The decode worker pulls, computes as PREFILL and hands the whole prompt to the first one."""
    rig.submit(rig.decode, 3, Mode.PREFILL, 100, pull=rig.pull(48))
    await until(lambda: 3 in rig.frontend.tokens)
    assert rig.decode.engine.counters.prompt_tokens_computed == 52
    rig.links[rig.decode].send(Cancel(3))  # nobody reads it here


async def test_evicted_before_the_lease(rig: Rig) -> None:
    """What the router believed is not there any more: the prompt is computed, nothing fails."""
    for number in range(6):  # 128 blocks in the pool, 25 a prompt
        rig.submit(rig.prefill, 10 + number, Mode.LOCAL, 200, seed=10 + number)
    await until(lambda: len(rig.frontend.ended) == 7)
    rig.submit(rig.decode, 3, Mode.LOCAL, 100, pull=rig.pull(96))
    await until(lambda: 3 in rig.frontend.ended)
    assert rig.frontend.tokens[3] == rig.frontend.tokens[1]
    assert rig.decode.engine.counters.prompt_tokens_computed == 100
    assert rig.decode.host.pulls.counters.failures == {"lease_refused": 1}


async def test_owner_dies_while_it_is_read(rig: Rig) -> None:
    rig.submit(rig.decode, 3, Mode.LOCAL, 9, seed=3, pull=rig.pull(8))  # connects
    await until(lambda: 3 in rig.frontend.ended)
    rig.decode.transfer.faults.hang = True
    rig.submit(rig.decode, 5, Mode.LOCAL, 100, pull=rig.pull(96))
    await until(lambda: rig.decode.transfer.busy)
    for peer in list(rig.decode.host.peers._peers.values()):
        peer.link.close("killed")
    await until(lambda: 5 in rig.frontend.ended)
    assert rig.frontend.ended[5].retryable
    await until(lambda: rig.decode.engine.block_states().quarantined == 13)
    rig.decode.transfer.faults.hang = False
    await rig.everything_is_free()
    rig.submit(rig.decode, 7, Mode.LOCAL, 100, pull=rig.pull(96))  # dials again
    await until(lambda: 7 in rig.frontend.ended)
    assert rig.frontend.tokens[7] == rig.frontend.tokens[1]
    assert rig.decode.engine.counters.prompt_tokens_pulled == 96


async def test_cancel_while_pulling(rig: Rig) -> None:
    rig.submit(rig.decode, 3, Mode.LOCAL, 9, seed=3, pull=rig.pull(8))
    await until(lambda: 3 in rig.frontend.ended)
    rig.decode.transfer.faults.hang = True
    rig.submit(rig.decode, 5, Mode.PREFILL, 100, pull=rig.pull(96))
    await until(lambda: rig.decode.transfer.busy)
    rig.links[rig.decode].send(Cancel(5))
    await until(lambda: rig.decode.engine.block_states().quarantined > 0)
    assert rig.decode.host.busy
    rig.decode.transfer.faults.hang = False
    await rig.everything_is_free()
    assert 5 not in rig.frontend.tokens


@pytest.mark.parametrize("mode", [Mode.LOCAL, Mode.PREFILL])
async def test_step_that_fails_while_a_read_is_in_flight(rig: Rig, mode: Mode) -> None:
    """What the read may still write is nobody's until it ended."""
    rig.submit(rig.decode, 3, Mode.LOCAL, 9, seed=3, pull=rig.pull(8))
    await until(lambda: 3 in rig.frontend.ended)
    rig.decode.transfer.faults.hang = True
    rig.submit(rig.decode, 5, mode, 100, pull=rig.pull(96))
    await until(lambda: rig.decode.transfer.busy)
    runner = rig.decode.engine._runner
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "run", lambda plan: 1 / 0)
        rig.submit(rig.decode, 7, Mode.LOCAL, 40, seed=7)
        await until(lambda: {5, 7} <= set(rig.frontend.ended))
    await until(lambda: not rig.decode.host.reader._jobs)
    assert rig.decode.engine.block_states().quarantined >= 12
    rig.submit(rig.decode, 9, Mode.LOCAL, 100)
    await until(lambda: 9 in rig.frontend.ended)
    assert rig.frontend.tokens[9] == rig.frontend.tokens[1]
    rig.decode.transfer.faults.hang = False


async def test_many_pull_at_once(rig: Rig) -> None:
    for number in range(20):
        rig.submit(rig.decode, 100 + number, Mode.LOCAL, 60 + number, pull=rig.pull(96))
    await until(lambda: len(rig.frontend.ended) == 21, 20)
    assert all(ended.error is None for ended in rig.frontend.ended.values())
    assert all(len(tokens) == NEW_TOKENS for tokens in rig.frontend.tokens.values())
    assert rig.decode.engine.counters.prompt_tokens_pulled > 0
