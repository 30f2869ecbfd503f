"""Faults that users reported of other servers, each test named after its case, in the whole application.

`app` is disaggregated in one run and a lone decode worker in the other: what is right is the same for both.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from serving.engine.base import FinishReason
from tests.tiny_tokenizer import tiny_tokenizer
from tests.unit.app_rig import BLOCK_TOKENS, CONTEXT_TOKENS, LONG_S, App, prompt
from tests.unit.handoff_fakes import until

STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@pytest.fixture(params=[1, 0], ids=["handed_over", "local"])
async def app(request: pytest.FixtureRequest) -> AsyncIterator[App]:
    async with App(prefill=request.param) as app:
        yield app


def token_of(text: str) -> int:
    (token,) = tiny_tokenizer().encode(text, add_special_tokens=False)
    return token


async def first_token(app: App, ids: list[int]) -> str:
    """The text of the first token of the greedy answer to `ids`."""
    return (await app.complete(ids, max_tokens=1)).text


# ---------------------------------------------------------------- sampling


@STREAM
async def test_seed_repeats(app: App, stream: bool) -> None:
    answers = [
        (await app.complete(prompt(30), temperature=1, seed=seed, stream=stream)).said for seed in (7, 7, 8)
    ]
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]


async def test_seed_among_unseeded(app: App) -> None:
    alone = await app.complete(prompt(30), temperature=1, seed=42, max_tokens=40)
    others = [app.complete(prompt(30, salt), temperature=1, max_tokens=40) for salt in range(8)]
    beside, *_ = await asyncio.gather(
        app.complete(prompt(30), temperature=1, seed=42, max_tokens=40), *others
    )
    assert beside.said == alone.said


async def test_no_seed_varies(app: App) -> None:
    answers = {(await app.complete(prompt(30), temperature=1)).text for _ in range(5)}
    assert len(answers) > 1


@STREAM
async def test_min_tokens(app: App, stream: bool) -> None:
    """Several tokens would stop it, the first of them at once."""
    plain = await app.client().complete(prompt=prompt(30), temperature=0, max_tokens=3, logprobs=0)
    stops = [token_of(text) for text in plain.json["choices"][0]["logprobs"]["tokens"]]
    short = await app.complete(prompt(30), max_tokens=60, stop_token_ids=stops, stream=stream)
    assert (short.text, short.reason, short.n_tokens) == ("", "stop", 1)
    long = await app.complete(prompt(30), max_tokens=60, stop_token_ids=stops, min_tokens=40, stream=stream)
    assert long.n_tokens >= 40


async def test_max_tokens_one_text(app: App) -> None:
    answer = await app.complete(prompt(20), max_tokens=1)
    assert answer.text
    assert (answer.reason, answer.n_tokens) == ("length", 1)
    chat = await app.client().chat(max_tokens=1, temperature=0)
    (choice,) = chat.json["choices"]
    assert choice["message"]["content"]
    assert choice["finish_reason"] == "length"
    assert chat.json["usage"]["completion_tokens"] == 1


# ---------------------------------------------------------------- the first token


@STREAM
async def test_max_tokens_one_exact(app: App, stream: bool) -> None:
    one = await app.complete(prompt(40), max_tokens=1, stream=stream)
    handed_over = bool(app.pool("prefill"))
    assert (app.pool("decode")[0].counters.steps == 0) == handed_over  # decode is not called
    longer = await app.complete(prompt(40), max_tokens=8, stream=stream)
    assert one.n_tokens == 1
    assert one.text
    assert longer.text.startswith(one.text)


@STREAM
async def test_stop_on_first_token(app: App, stream: bool) -> None:
    first = await first_token(app, prompt(40))
    answer = await app.complete(prompt(40), max_tokens=8, stop=[first], stream=stream)
    assert (answer.text, answer.reason) == ("", "stop")


@STREAM
async def test_prefill_end_skips_decode(stream: bool) -> None:
    async with App() as app:
        (prefill,), (decode,) = app.pool("prefill"), app.pool("decode")
        first = token_of(await first_token(app, prompt(40)))
        answer = await app.complete(prompt(40), max_tokens=8, stop_token_ids=[first], stream=stream)
        assert answer.said == ("", FinishReason.STOP.value, 1)
        await app.is_idle()
        assert decode.counters.steps == decode.counters.tokens_generated == 0
        assert decode.host.transfers.blocks == 0
        assert prefill.host.leases == 0


# ---------------------------------------------------------------- the cache


async def test_repeat_prompt_hits(app: App) -> None:
    text = " ".join(["relay", "races", "hand", "on"] * 30)
    cold, warm = [await app.complete(text) for _ in range(2)]
    assert cold.cached == 0
    assert warm.cached > 0
    assert warm.said == cold.said


async def test_cached_within_prompt(app: App) -> None:
    """`Answer` checks 0 <= cached <= prompt each time."""
    answers = [await app.complete(prompt(100)) for _ in range(3)]
    assert [a.cached for a in answers] == [0, 96, 96]
    assert len({a.said for a in answers}) == 1


async def test_full_hit_at_block_edge(app: App) -> None:
    lengths = [n for edge in (16, 24, 32, 64, 128) for n in (edge - 1, edge, edge + 1)]
    for n in lengths:
        cold, warm = [await app.complete(prompt(n, salt=n), max_tokens=4) for _ in range(2)]
        assert warm.said == cold.said
        assert warm.cached == (n - 1) // BLOCK_TOKENS * BLOCK_TOKENS  # the last token is always computed


async def test_cold_equals_warm(app: App) -> None:
    answers = [await app.complete(prompt(400), max_tokens=30, stream=True) for _ in range(3)]
    assert len({a.said for a in answers}) == 1
    assert answers[-1].cached > 0


async def test_shared_prefix_no_bleed(app: App) -> None:
    prompts = [prompt(200) + prompt(30, salt) for salt in (1, 2, 3)]
    async with App(prefill=len(app.pool("prefill"))) as fresh:
        alone = [(await fresh.complete(ids, max_tokens=30)).said for ids in prompts]
    for _ in range(2):  # cold, then warm
        together = await asyncio.gather(*(app.complete(ids, max_tokens=30) for ids in prompts))
        assert [a.said for a in together] == alone
    assert len(set(alone)) == 3


async def test_salt_isolates(app: App) -> None:
    answers = [await app.complete(prompt(100), cache_salt=salt) for salt in ("a", "a", "b")]
    assert [a.cached > 0 for a in answers] == [False, True, False]
    assert len({a.said for a in answers}) == 1


# ---------------------------------------------------------------- many at once


@pytest.mark.parametrize("prefill", [1, 0], ids=["handed_over", "local"])
async def test_no_budget_still_concurrent(prefill: int) -> None:
    """The pool holds two whole contexts: three that reserved one each would run one after another."""
    two_contexts = 2 * CONTEXT_TOKENS * 64  # a token takes 64 bytes
    async with App(prefill=prefill, profile={"step_ms": 1}, kv_bytes=two_contexts) as app:
        clients = [app.client() for _ in range(3)]
        asked = [asyncio.create_task(client.chat(stream=True)) for client in clients]
        live = app.coordinator()._live
        await until(lambda: len(live) == 3 and all(len(run.sent) > 20 for run in live), LONG_S)
        assert all(run.request.params.max_tokens > CONTEXT_TOKENS / 2 for run in live)
        for client in clients:
            client.leave.set()
        await asyncio.gather(*asked)
