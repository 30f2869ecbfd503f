"""The HTTP layer: limits, stops, salt and cached tokens, from a body to its answer."""

from __future__ import annotations

import dataclasses

from tests.scripted import ScriptedGenerator, make_client
from tests.tiny_tokenizer import ids, tiny_model
from tests.unit.api_rig import BOTH, STREAM, ask, text_of


async def test_max_completion_tokens() -> None:
    choice = (await make_client().chat(max_completion_tokens=3)).json["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "Hello,")


@BOTH
async def test_max_tokens_one_text(endpoint: str) -> None:
    reply = await ask(make_client(), endpoint, max_tokens=1)
    assert text_of(reply, stream=False) == "Hel"
    assert reply.json["usage"]["completion_tokens"] == 1
    assert reply.json["choices"][0]["finish_reason"] == "length"


@BOTH
async def test_max_tokens_one_exact(endpoint: str) -> None:
    client = make_client()
    longer = (await ask(client, endpoint, stream=True)).text()
    reply = await ask(client, endpoint, stream=True, max_tokens=1, stream_options={"include_usage": True})
    assert longer.startswith(reply.text() or "?")
    assert reply.chunks[-1]["usage"]["completion_tokens"] == 1
    assert reply.reasons() == ["length"]


async def test_salt_isolates() -> None:
    """The salt reaches the generator as its own field, never as part of the prompt."""
    generator = ScriptedGenerator()
    client = make_client(generator)
    for salt in ("a", "b", None):
        await client.complete(cache_salt=salt)
    assert [request.cache_salt for request in generator.requests] == ["a", "b", ""]
    assert len({request.prompt.tobytes() for request in generator.requests}) == 1


@STREAM
async def test_a_stop_token_is_no_part_of_the_text(stream: bool) -> None:
    """The engine ends on it and counts it; so with EOS, also one the tokenizer does not call special."""
    answer = ids("one two")
    generator = ScriptedGenerator(answer=lambda request: answer)
    eos = tiny_model()
    model = dataclasses.replace(eos, eos_ids=frozenset(answer[-1:]))
    shown = "one two".removesuffix(eos.tokenizer.decode(answer[-1:]))
    by_eos = await make_client(generator, [model]).chat(stream=stream)
    by_id = await make_client(generator).chat(stream=stream, stop_token_ids=answer[-1:])
    ignored = await make_client(generator, [model]).chat(stream=stream, ignore_eos=True)
    assert [text_of(reply, stream) for reply in (by_eos, by_id, ignored)] == [shown, shown, "one two"]
    if not stream:
        assert by_id.json["usage"]["completion_tokens"] == len(answer)


@STREAM
async def test_stop_on_first_token(stream: bool) -> None:
    first = "Hel"
    assert ids(first) == ids("Hello, world!")[:1]
    reply = await make_client().chat(stream=stream, stop=[first])
    assert text_of(reply, stream) == ""
    assert (reply.reasons() if stream else [reply.json["choices"][0]["finish_reason"]]) == ["stop"]


async def test_cached_within_prompt() -> None:
    reply = await make_client(ScriptedGenerator(cached_tokens=2)).complete(prompt="one two three")
    usage = reply.json["usage"]
    assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] == 2 <= usage["prompt_tokens"]
