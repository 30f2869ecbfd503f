"""Reported faults of operation (health, names, ids, stalls, tools), each as a test under its id."""

from __future__ import annotations

import asyncio
import itertools
import json
from time import monotonic
from typing import Any

import pytest

from serving.bodies import BodyLimits
from serving.door import Door
from tests.scripted import Client, ScriptedGenerator, make_client
from tests.tiny_tokenizer import ids, tiny_model
from tests.unit.app_rig import Answer, App, prompt

HEALTH_S = 1.0  # within which a probe must be answered
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


async def slowest_probe(client: Client, until: asyncio.Future[Any]) -> float:
    """GET /health over and over until then: the longest that one took, waiting for its turn included."""
    longest = 0.0
    while not until.done():
        began = monotonic()
        reply = await client.send("GET", "/health")
        assert reply.status == 200
        await asyncio.sleep(0.005)
        longest = max(longest, monotonic() - began)
    return longest


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_stream_starts_200(path: str) -> None:
    body = {"model": "tiny", "stream": True, "prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    reply = await make_client().send("POST", path, body)
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert "content-length" not in reply.headers  # so that a server sends it in chunks
    assert reply.complete
    assert reply.events[-1] == "[DONE]"
    assert reply.text()


async def test_models_list() -> None:
    reply = await make_client(models=[tiny_model("org/a"), tiny_model("b")]).send("GET", "/v1/models")
    assert reply.json["object"] == "list"
    for card in reply.json["data"]:
        assert card["object"] == "model"
        assert {"id", "created", "owned_by"} <= set(card)
    assert {card["id"] for card in reply.json["data"]} == {"org/a", "b"}


async def test_model_retrieve() -> None:
    client = make_client(models=[tiny_model("org/a")])
    card = await client.send("GET", "/v1/models/org/a")
    assert (card.status, card.json["id"], card.json["object"]) == (200, "org/a", "model")
    for wrong in ("a", "org", "org/a/b", "", "org%2Fa"):
        reply = await client.send("GET", f"/v1/models/{wrong}")
        assert reply.status == 404, wrong
        assert reply.json["error"]["code"] == "model_not_found"


async def test_health_during_long_prompt() -> None:
    """3 MB are tokenised beside the event loop, and not at all where they cannot fit."""
    text = "relay races hand the baton on; " * 100_000
    door = Door(bodies=BodyLimits(body_bytes=16 << 20))
    roomy = make_client(ScriptedGenerator(), [tiny_model(context_tokens=4 << 20)], door=door)
    roomy.patience_s = 60.0
    asking = asyncio.ensure_future(roomy.complete(prompt=text, max_tokens=2))
    assert await slowest_probe(roomy, asking) < HEALTH_S
    assert (await asking).json["usage"]["prompt_tokens"] > 500_000
    small = make_client(door=door)
    asking = asyncio.ensure_future(small.chat(messages=[{"role": "user", "content": text}]))
    assert await slowest_probe(small, asking) < HEALTH_S
    assert (await asking).json["error"]["code"] == "context_length_exceeded"
    assert (await make_client().send("POST", "/v1/completions", b"x" * (17 << 20))).status == 413


async def test_health_during_prefill() -> None:
    async with App(profile={"prefill_ms_per_token": 1.0}) as app:
        asking = asyncio.gather(*(app.complete(prompt(900, n), max_tokens=2) for n in range(2)))
        assert await slowest_probe(app.client(), asking) < HEALTH_S
        await asking


async def test_long_prompt_no_stall() -> None:
    """One worker does it all. A prompt of 900 tokens takes it 1.8 s; beside a stream it comes in chunks."""
    profile = {"prefill_ms_per_token": 2.0, "step_ms": 2.0}
    async with App(prefill=0, profile=profile, router={"local_prefill": True}) as app:
        arrivals: list[float] = []
        send = app.client()
        stream = asyncio.ensure_future(app.complete(prompt(8), max_tokens=60))
        run = await app.run_reaches(3)
        long = asyncio.ensure_future(send.complete(prompt=prompt(900, 1), max_tokens=2, temperature=0))
        seen = len(run.sent)
        while not stream.done():
            if len(run.sent) > seen:
                seen = len(run.sent)
                arrivals.append(monotonic())
            await asyncio.sleep(0.001)
        assert isinstance(await stream, Answer)
        assert (await long).status == 200
        worst = max(b - a for a, b in itertools.pairwise(arrivals))
        assert worst < 0.9, worst  # a chunk of 64 tokens takes 0.13 s, the whole prompt 1.8 s


async def test_request_id_duplicate() -> None:
    """Three at once under one id: all answer, under names of our own inside."""
    async with App() as app:
        body = {"model": "tiny", "prompt": prompt(20), "max_tokens": 8, "temperature": 0}
        header = {"x-request-id": "the-same"}
        replies = await asyncio.gather(
            *(app.client().send("POST", "/v1/completions", body, header) for _ in range(3))
        )
        assert [reply.status for reply in replies] == [200] * 3
        assert {reply.headers["x-request-id"] for reply in replies} == {"the-same"}
        assert len({reply.json["id"] for reply in replies}) == 3
        assert len({reply.json["choices"][0]["text"] for reply in replies}) == 1


@pytest.mark.parametrize(
    "content_type",
    [
        "application/json; charset=utf-8",
        "application/json;charset=UTF-8",
        "text/plain",
        "APPLICATION/JSON",
        "",
    ],
)
async def test_content_type_with_charset(content_type: str) -> None:
    text = "Größe 漢字 🚀"
    generator = ScriptedGenerator(answer=lambda request: list(request.prompt))
    body = json.dumps({"model": "tiny", "prompt": text}, ensure_ascii=False).encode()
    header = {"content-type": content_type} if content_type else {}
    reply = await make_client(generator).send("POST", "/v1/completions", body, header)
    assert reply.status == 200
    assert list(generator.requests[0].prompt) == ids(text)


# ---------------------------------------------------------------- tools are not parsed: they are refused


@pytest.mark.parametrize(
    "stream", [False, True], ids=["tool_arguments_are_string", "tool_stream_assembles"]
)
@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "f"}}])
async def test_tool_arguments_are_string_and_tool_stream_assembles(stream: bool, choice: Any) -> None:
    """No call is ever made up from text: the request is refused before it costs anything."""
    generator = ScriptedGenerator()
    reply = await make_client(generator).chat(tools=[TOOL], tool_choice=choice, stream=stream)
    assert reply.status == 400
    assert reply.json["error"]["code"] == "unsupported_feature"
    assert reply.json["error"]["param"] == "tools"
    assert generator.requests == []


async def test_tool_many() -> None:
    tools = [{**TOOL, "function": {**TOOL["function"], "name": f"f{n}"}} for n in range(20)]  # type: ignore[dict-item]
    assert (await make_client().chat(tools=tools, tool_choice="none")).status == 200
    assert (await make_client().chat(tools=tools)).status == 400
