"""The HTTP layer: prompts of every form, several at once, echoed, as messages, with tools."""

from __future__ import annotations

from typing import Any

import pytest

from serving.errors import WorkerLost
from serving.generation import GenerationRequest
from tests.scripted import ScriptedGenerator, make_client
from tests.tiny_tokenizer import ids, tiny_model
from tests.unit.api_rig import STREAM, text_of


def echo_prompt(request: GenerationRequest) -> list[int]:
    """A model whose answer depends on its prompt alone."""
    return list(request.prompt)[:3]


@STREAM
async def test_batch_order(stream: bool) -> None:
    prompts = ["one two three", "four five six", "seven eight nine", "fox"]
    client = make_client(ScriptedGenerator(answer=echo_prompt))
    single = [text_of(await client.complete(prompt=p), stream=False) for p in prompts]
    for order in (prompts, prompts[::-1]):
        reply = await client.complete(prompt=order, stream=stream)
        assert [text_of(reply, stream, i) for i in range(4)] == [single[prompts.index(p)] for p in order]


async def test_batch_stream_index() -> None:
    client = make_client(ScriptedGenerator(answer=echo_prompt))
    reply = await client.complete(prompt=[ids("one"), ids("two"), ids("fox"), ids("dog")], stream=True)
    assert [reply.text(i) for i in range(4)] == ["one", "two", "fox", "dog"]
    assert all(reply.reasons(i) == ["stop"] for i in range(4))


async def test_one_bad_prompt_fails_the_whole_request() -> None:
    generator = ScriptedGenerator(error=WorkerLost("gone"), answer=lambda request: [])
    reply = await make_client(generator).complete(prompt=["a", "b", "c"])
    assert reply.status == 503
    assert all(ticket.cancelled for ticket in generator.tickets)


@STREAM
@pytest.mark.parametrize(
    "prompt", ["The quick fox \U0001f389", ids("The quick fox \U0001f389")], ids=["text", "ids"]
)
async def test_echo_no_extra_token(stream: bool, prompt: Any) -> None:
    generator = ScriptedGenerator()
    fields: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    reply = await make_client(generator).complete(
        prompt=prompt, echo=True, max_tokens=0, stream=stream, **fields
    )
    assert text_of(reply, stream) == "The quick fox \U0001f389"
    usage = reply.chunks[-1]["usage"] if stream else reply.json["usage"]
    assert usage["completion_tokens"] == 0
    assert usage["prompt_tokens"] == len(ids("The quick fox \U0001f389"))
    assert not generator.requests


@STREAM
async def test_echo_goes_before_the_answer(stream: bool) -> None:
    reply = await make_client().complete(prompt="one two", echo=True, max_tokens=2, stream=stream)
    assert text_of(reply, stream) == "one twoHello"


@STREAM
async def test_echo_stream_logprobs(stream: bool) -> None:
    reply = await make_client().complete(echo=True, logprobs=1, max_tokens=0, stream=stream)
    assert (reply.status, reply.json["error"]["param"]) == (400, "logprobs")


async def test_echo_max_tokens_zero() -> None:
    client = make_client()
    assert (await client.complete(echo=True, max_tokens=0)).status == 200
    assert (await client.complete(max_tokens=0)).status == 400


async def test_roles_not_alternating() -> None:
    roles = [{"role": role, "content": "x"} for role in ("system", "user", "user")]
    reply = await make_client().chat(messages=roles)
    assert reply.status == 400
    assert "roles must alternate" in reply.json["error"]["message"]


async def test_assistant_with_tool_calls() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "[1, 2, 3]"},
    ]
    assert (await make_client().chat(messages=messages)).status == 200


async def test_content_parts_equal_text() -> None:
    client = make_client(ScriptedGenerator(answer=echo_prompt))
    parts = [{"type": "text", "text": "Hello"}]
    one, other = [
        (await client.chat(messages=[{"role": "user", "content": c}])).json for c in ("Hello", parts)
    ]
    assert one["usage"] == other["usage"]
    assert one["choices"] == other["choices"]


@pytest.mark.parametrize(
    ("choice", "status"), [("required", 400), ("auto", 400), (None, 400), ("none", 200)]
)
async def test_tool_reason_matches_calls(choice: str | None, status: int) -> None:
    """Tools are not supported: refused where a call could come, an ordinary answer where none may."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    reply = await make_client().chat(tools=tools, tool_choice=choice)
    assert reply.status == status
    if status == 400:
        assert reply.json["error"]["param"] == "tools"
    else:
        assert reply.json["choices"][0]["finish_reason"] == "stop"
        assert "tool_calls" not in reply.json["choices"][0]["message"]


async def test_unusual_roles() -> None:
    client = make_client(ScriptedGenerator(answer=echo_prompt))
    user = {"role": "user", "content": "x"}
    replies = [
        await client.chat(messages=[{"role": r, "content": "y"}, user]) for r in ("developer", "system")
    ]
    assert [reply.status for reply in replies] == [200, 200]
    assert replies[0].json["usage"] == replies[1].json["usage"]


async def test_a_model_without_a_template_has_no_chat() -> None:
    client = make_client(models=[tiny_model(template=None)])
    assert (await client.chat()).json["error"]["param"] == "model"
    assert (await client.complete()).status == 200


async def test_long_prompts_are_tokenised_off_the_loop_and_answered() -> None:
    model = tiny_model(context_tokens=100_000)
    generator = ScriptedGenerator(answer=lambda request: list(request.prompt)[:1])
    reply = await make_client(generator, [model]).complete(prompt="word " * 5000)
    assert reply.status == 200
    assert list(generator.requests[0].prompt) == ids("word " * 5000)
