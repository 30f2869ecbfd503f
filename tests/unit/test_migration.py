"""Running requests that move between whole workers with their KV: the answer is that of one that stayed."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from msgspec import structs

from serving.engine.base import Mode, SamplingParams
from serving.wire import Chunk, Handoff, Message
from tests.unit.handoff_fakes import until
from tests.unit.migration_rig import BLOCK_TOKENS, Rig, held, prompt
from tests.unit.migration_states import A, B, C, copying, stage
from tests.unit.tiny_models import save_tiny_model

D = 4
SAMPLED = SamplingParams(max_tokens=40, seed=11, temperature=0.9, top_p=0.9, ignore_eos=True, logprobs=2)
PENALISED = SamplingParams(
    max_tokens=40,
    seed=12,
    temperature=1.1,
    top_k=50,
    presence_penalty=0.7,
    frequency_penalty=0.4,
    repetition_penalty=1.2,
    logit_bias={17: 2.0},
    min_tokens=35,
    stop_token_ids=(20, 21, 22),
    logprobs=1,
)
GREEDY = SamplingParams(max_tokens=40, seed=0, temperature=0.0, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("llama"))


# The prompt has 13 tokens: with 3, 4, 11, 12 generated ones the last block is about to be full, or just is.
@pytest.mark.parametrize("lag", [0, 1, 3], ids="lag-{}".format)
@pytest.mark.parametrize("position", [1, 2, 3, 4, 5, 11, 12, 38, 39])
async def test_moved_at_any_position(position: int, lag: int) -> None:
    """`lag`: tokens that were drawn before the frontend knew of them."""
    async with Rig() as rig:
        source, target = rig.workers
        await rig.stands_at(source, A, prompt(13), position)
        rig.move(source, A, target, B, known=max(position - lag, 0))
        await rig.ends(A, B)
        assert rig.frontend.outcome(A) == "moved"
        assert rig.frontend.outcome(B) == "length"
        assert rig.frontend.count(A) == position  # the source drew nothing more
        moved = rig.frontend.stream(A, B)
        assert target.engine.counters.prompt_tokens_computed == 0
        assert target.engine.counters.content_checks == -(-(13 + position - 1) // BLOCK_TOKENS)
        assert moved == await rig.reference(prompt(13))
        assert (source.out, target.came) == ({"moved": 1}, {"moved": 1})


@pytest.mark.parametrize("nixl", [False, True], ids=["local", "nixl"])
async def test_goes_on_while_it_is_copied(nixl: bool) -> None:
    """Nobody holds anything back: what is drawn and by whom is up to the machines."""
    params = structs.replace(SAMPLED, max_tokens=150)
    prompts = {attempt: prompt(100 + attempt, salt=attempt) for attempt in range(10, 14)}
    async with Rig(1, kv_bytes=1 << 18) as rig:
        unmoved = {attempt: await rig.reference(text, params) for attempt, text in prompts.items()}
    async with Rig(nixl=nixl, step_ms=5, kv_bytes=1 << 18) as rig:
        source, target = rig.workers
        await rig.connect(source, target)
        for attempt, text in prompts.items():
            rig.start(source, attempt, text, params)
        await until(lambda: all(rig.frontend.count(attempt) > 5 for attempt in prompts))
        for attempt in prompts:
            rig.move(source, attempt, target, attempt + 100, params=params)
        await rig.ends(*prompts, *(attempt + 100 for attempt in prompts))
        for attempt in prompts:
            assert rig.frontend.outcome(attempt) == "moved"
            assert rig.frontend.stream(attempt, attempt + 100) == unmoved[attempt]


@pytest.mark.parametrize("params", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
@pytest.mark.parametrize("drawn", [0, 1, 2, 9], ids="drawn-{}".format)
async def test_tokens_drawn_during_the_copy(drawn: int, params: SamplingParams) -> None:
    async with Rig() as rig:
        source, target = rig.workers
        await rig.connect(source, target)
        await rig.stands_at(source, A, prompt(20), 4, params)
        target.local.faults.hang = True
        rig.move(source, A, target, B, params=params)
        await until(lambda: target.local.busy)
        source.grant(drawn)
        await until(lambda: rig.frontend.count(A) == 4 + drawn)
        target.local.faults.hang = False
        await rig.ends(A, B)
        assert rig.frontend.count(A) == 4 + drawn
        assert rig.frontend.stream(A, B) == await rig.reference(prompt(20), params)


@pytest.mark.parametrize(
    "params", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalties-and-bans"]
)
@pytest.mark.parametrize("position", [1, 4, 17])
async def test_a_real_model_goes_on_alike(directory: Path, position: int, params: SamplingParams) -> None:
    """In float32, log-probabilities included."""
    async with Rig(directory=directory, kv_bytes=1 << 20) as rig:
        source, target = rig.workers
        await rig.stands_at(source, A, prompt(21), position, params)
        rig.move(source, A, target, B, known=position - 1, params=params)
        await rig.ends(A, B)
        assert rig.frontend.outcome(A) == "moved"
        assert rig.frontend.count(B) > 0
        moved, reason = rig.frontend.stream(A, B), rig.frontend.outcome(B)
        rig.frontend.ended.clear()
        assert moved == await rig.reference(prompt(21), params)
        assert reason in ("stop", "length")


async def test_back_and_forth_over_three_workers() -> None:
    """Each way only what is not there yet is read."""
    async with Rig(3) as rig:
        one, two, three = rig.workers
        await rig.stands_at(one, A, prompt(30), 3, SAMPLED)
        path = [(one, A), (two, B), (three, C), (one, D)]
        for (source, attempt), (target, new) in pairwise(path):
            target.grant(0)
            rig.move(source, attempt, target, new, params=SAMPLED)
            await rig.ends(attempt)
            target.grant(6)
            await rig.drew(new, 6)
            # The next move needs one attempt's rows to tell the whole answer.
            rig.frontend.rows[new] = rig.frontend.rows[attempt] + rig.frontend.rows[new]
            rig.prompts[new] = prompt(30)
            rig.n_prompt[new] = 30
        one.grant(None)
        await rig.ends(D)
        assert [rig.frontend.outcome(a) for a in (A, B, C, D)] == ["moved", "moved", "moved", "length"]
        assert [w.local.counters.blocks for w in (two, three)] == [4, 5]
        assert one.local.counters.blocks == 2  # of 6: it had 4 full ones left
        moved = rig.frontend.stream(D)
        assert moved == await rig.reference(prompt(30), SAMPLED)


async def test_a_prefix_that_the_target_has_is_not_read() -> None:
    async with Rig() as rig:
        source, target = rig.workers
        await rig.reference(prompt(64))  # on the target
        await rig.stands_at(source, A, prompt(64), 2)
        rig.move(source, A, target, B)
        await rig.ends(A, B)
        assert target.local.counters.blocks == 1
        moved = rig.frontend.stream(A, B)
        assert moved == await rig.reference(prompt(64))


@pytest.mark.parametrize("n_known", [3, 4], ids=["last-token-is-new", "last-token-fills-a-block"])
async def test_a_target_that_has_everything(n_known: int) -> None:
    """It computes the last token itself, whatever it has cached."""
    async with Rig() as rig:
        source, target = rig.workers
        whole = await rig.reference(prompt(12))
        await rig.stands_at(source, A, prompt(12), n_known)
        rig.move(source, A, target, B)
        await rig.ends(A, B)
        assert rig.frontend.stream(A, B) == whole
        assert target.local.counters.blocks == 1


async def test_left_blocks_are_found_again() -> None:
    """What moved away stays cached at its source."""
    async with Rig() as rig:
        source, target = rig.workers
        await rig.stands_at(source, A, prompt(64), 3)
        rig.move(source, A, target, B)
        await rig.ends(A, B)
        source.grant(None)
        rig.start(source, C, prompt(64))
        await rig.ends(C)
        assert source.engine.counters.prompt_tokens_cached == 56


async def test_reserve_is_the_most_that_is_drawn_meanwhile() -> None:
    """The copy takes for ever: the source stops when the target has no room for more."""
    async with Rig() as rig:
        source, target = rig.workers
        await rig.connect(source, target)
        await rig.stands_at(source, A, prompt(20), 4)
        target.local.faults.hang = True
        rig.move(source, A, target, B, reserve_tokens=10)
        await until(lambda: target.local.busy)
        source.grant(None)
        room = -(-(24 + 10) // BLOCK_TOKENS) * BLOCK_TOKENS - 24
        await until(lambda: rig.frontend.count(A) >= 4 + room)
        target.local.faults.hang = False
        await rig.ends(A, B)
        assert rig.frontend.count(A) == 4 + room
        assert rig.frontend.stream(A, B) == await rig.reference(prompt(20))


async def test_beside_another_hand_off() -> None:
    """A prompt's KV is read from the source while a running request leaves it."""
    async with Rig() as rig:
        source, target = rig.workers
        await copying(rig)
        me = source.host.me
        source.grant(0)
        rig.start(source, 70, prompt(40, salt=7), mode=Mode.PREFILL)
        await until(lambda: stage(source, 70) is not None)
        source.grant(1)
        await until(lambda: rig.frontend.count(70) == 1)
        rig.n_prompt[71] = 40
        handoff = Handoff(source.address, me.ident, me.epoch, 70)
        rig._submit(target, 71, prompt(40, salt=7), Mode.DECODE, handoff=handoff)
        await until(lambda: len(target.local._reads) == 2)
        target.local.faults.hang = False
        await rig.ends(A, B, 71)
        assert rig.frontend.outcome(A) == "moved"
        assert rig.frontend.stream(A, B) == await rig.reference(prompt(20))
        assert rig.frontend.stream(70, 71) == await rig.reference(prompt(40, salt=7))


async def test_short_one_is_paused_at_once() -> None:
    """Nothing but the last chunk where no block is full yet."""
    async with Rig() as rig:
        source, target = rig.workers
        await rig.connect(source, target)
        await rig.stands_at(source, A, prompt(3), 2)
        (link,) = [ln for ln in source.host._server._links if ln.peer and ln.peer.kind == "worker"]
        sent: list[Message] = []
        let_go = held(link, (Chunk,), sent)
        rig.move(source, A, target, B)
        await until(lambda: sent)
        let_go()
        await rig.ends(A, B)
        (chunk,) = sent
        assert isinstance(chunk, Chunk)
        assert (chunk.first, chunk.last) == (0, True)
        assert rig.frontend.stream(A, B) == await rig.reference(prompt(3))
