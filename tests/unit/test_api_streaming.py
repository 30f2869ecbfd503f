"""The HTTP layer: the chunks of a stream, what they end with, and clients that wait or leave."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from serving.errors import WorkerLost
from tests.scripted import ScriptedGenerator, make_client
from tests.tiny_tokenizer import CONTEXT_TOKENS, ids
from tests.unit.api_rig import BOTH, STREAM, ask, text_of


@BOTH
async def test_finish_reason_last(endpoint: str) -> None:
    reply = await ask(make_client(), endpoint, stream=True)
    *chunks, finish = reply.chunks
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert finish["choices"][0].get("text", "") == ""
    assert finish["choices"][0].get("delta", {}) == {}
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert reply.text() == "Hello, world!"


@BOTH
@pytest.mark.parametrize("per_step", [1, 100])
async def test_finish_reason_once(endpoint: str, per_step: int) -> None:
    client = make_client(ScriptedGenerator(per_step=per_step))
    reply = await ask(client, endpoint, stream=True, stream_options={"include_usage": True})
    assert reply.reasons() == ["stop"]
    *chunks, usage = reply.chunks
    assert usage["usage"]["completion_tokens"] == len(ids("Hello, world!"))
    assert all(chunk["usage"] is None for chunk in chunks)


@BOTH
async def test_finish_reason_key_always(endpoint: str) -> None:
    reply = await ask(make_client(), endpoint, stream=True)
    assert all("finish_reason" in choice for chunk in reply.chunks for choice in chunk["choices"])


@BOTH
async def test_natural_stop_reported(endpoint: str) -> None:
    assert (await ask(make_client(), endpoint, stream=True)).reasons() == ["stop"]


async def test_role_in_first_chunk() -> None:
    deltas = [c["choices"][0]["delta"] for c in (await make_client().chat(stream=True)).chunks]
    assert deltas[0]["role"] == "assistant"
    assert all("role" not in delta for delta in deltas[1:])


@pytest.mark.parametrize("answer", ["", "Hello"])
async def test_role_even_when_empty(answer: str) -> None:
    """No answer at all, and one that a stop string cuts to nothing."""
    client = make_client(ScriptedGenerator(answer=lambda request: ids(answer)))
    reply = await client.chat(stream=True, stop=["H"])
    deltas = [c["choices"][0]["delta"] for c in reply.chunks]
    assert deltas == [{"role": "assistant", "content": ""}, {}]
    assert reply.reasons() == ["stop"]


@BOTH
@STREAM
async def test_stop_chat_not_leaked(endpoint: str, stream: bool) -> None:
    generator = ScriptedGenerator()
    reply = await ask(make_client(generator), endpoint, stream=stream, stop=["o"])
    assert text_of(reply, stream) == "Hell"
    if not stream:
        assert reply.json["choices"][0]["finish_reason"] == "stop"


@STREAM
@pytest.mark.parametrize("per_step", [1, 3, 100])
async def test_stop_on_token_path(stream: bool, per_step: int) -> None:
    """A stop string cancels upstream; usage counts up to the token that completed it."""
    answer = ids("one two three four five six")
    generator = ScriptedGenerator(answer=lambda request: answer, per_step=per_step)
    fields: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    reply = await make_client(generator).chat(stop=["three"], **fields)
    assert text_of(reply, stream) == "one two "
    assert generator.tickets[0].cancelled
    assert len(generator.sent) < len(answer) or per_step == 100
    usage = reply.chunks[-1]["usage"] if stream else reply.json["usage"]
    assert usage["completion_tokens"] == len(ids("one two three"))


@STREAM
@pytest.mark.parametrize("synchronous", [False, True])
async def test_stop_tail_flushed(stream: bool, synchronous: bool) -> None:
    generator = ScriptedGenerator(answer=lambda request: ids("one two three"), synchronous=synchronous)
    n = len(ids("one two"))
    reply = await make_client(generator).chat(stream=stream, max_tokens=n, stop=["two!"])
    assert text_of(reply, stream) == "one two"
    assert (reply.reasons() if stream else [reply.json["choices"][0]["finish_reason"]]) == ["length"]


async def test_a_sink_called_before_the_ticket_is_known() -> None:
    generator = ScriptedGenerator(synchronous=True, cached_tokens=2)
    client = make_client(generator)
    reply = await client.complete(
        stream=True, prompt=["a b", "c d"], stream_options={"include_usage": True}
    )
    assert [reply.text(0), reply.text(1)] == ["Hello, world!"] * 2
    assert reply.chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
    stopped = await client.chat(stream=True, stop=["o"])
    assert stopped.text() == "Hell"
    assert generator.tickets[-1].cancelled


@BOTH
async def test_usage_choices_field_present(endpoint: str) -> None:
    reply = await ask(make_client(), endpoint, stream=True, stream_options={"include_usage": True})
    assert all("choices" in chunk for chunk in reply.chunks)
    assert all("usage" not in chunk for chunk in (await ask(make_client(), endpoint, stream=True)).chunks)


async def test_long_prompt_stream_ends() -> None:
    prompt = "\u00e9" * (CONTEXT_TOKENS // 4)
    reply = await make_client().complete(prompt=prompt, stream=True, max_tokens=3)
    assert reply.reasons() == ["length"]


async def test_quiet_streams_get_keep_alives() -> None:
    client = make_client(ScriptedGenerator(hang=True), keep_alive_s=0.02)
    client.leave_after = b": keep-alive\n\n"
    reply = await client.chat(stream=True)
    assert reply.status == 200
    quiet = make_client(ScriptedGenerator(answer=lambda request: [], hang=True), keep_alive_s=0.02)
    quiet.leave_after = b": keep-alive\n\n"
    assert (await quiet.chat(stream=True)).body == b": keep-alive\n\n" * 3


async def test_an_error_after_a_keep_alive_is_an_event() -> None:
    class Late(ScriptedGenerator):
        def _run(self, *state: Any) -> None:
            asyncio.get_running_loop().call_later(0.05, super()._run, *state)

    generator = Late(answer=lambda request: [], error=WorkerLost("gone"))
    reply = await make_client(generator, keep_alive_s=0.02).chat(stream=True)
    assert reply.status == 200
    assert reply.events == [{"error": {**reply.events[0]["error"], "code": "worker_lost"}}]


@STREAM
async def test_a_client_that_leaves_cancels(stream: bool) -> None:
    generator = ScriptedGenerator(hang=True)
    records: list[Any] = []
    client = make_client(generator, on_end=records.append)
    asyncio.get_running_loop().call_later(0.02, client.leave.set)
    await client.chat(stream=stream)
    assert generator.tickets[0].cancelled
    assert [record.client_left for record in records] == [True]
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1
