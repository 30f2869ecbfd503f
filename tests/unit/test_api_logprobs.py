"""The HTTP layer: log probabilities, one entry a token, whole and streamed."""

from __future__ import annotations

import pytest

from tests.scripted import ScriptedGenerator, make_client
from tests.tiny_tokenizer import ids
from tests.unit.api_rig import BOTH, ask


@BOTH
async def test_logprobs_off_means_none(endpoint: str) -> None:
    client = make_client()
    assert (await ask(client, endpoint)).json["choices"][0]["logprobs"] is None
    streamed = await ask(client, endpoint, stream=True)
    assert all(chunk["choices"][0]["logprobs"] is None for chunk in streamed.chunks)


async def test_logprobs_cover_first_token() -> None:
    reply = (await make_client().chat(logprobs=True, top_logprobs=2)).json
    entries = reply["choices"][0]["logprobs"]["content"]
    assert len(entries) == reply["usage"]["completion_tokens"]
    assert reply["choices"][0]["message"]["content"].startswith(entries[0]["token"])
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


@pytest.mark.parametrize("per_step", [1, 2, 3, 50])
async def test_logprobs_stream_complete(per_step: int) -> None:
    """Also with more than one token a chunk, half characters, and a stop string in the middle."""
    answer = ids("one \U0001f389 two three")
    client = make_client(ScriptedGenerator(answer=lambda request: answer, per_step=per_step))
    for stop in (None, ["two"]):
        reply = await client.chat(
            stream=True, logprobs=True, stop=stop, stream_options={"include_usage": True}
        )
        *chunks, usage = reply.chunks
        entries = [
            e for c in chunks if c["choices"][0]["logprobs"] for e in c["choices"][0]["logprobs"]["content"]
        ]
        assert len(entries) == usage["usage"]["completion_tokens"]
        if stop is None:
            assert b"".join(bytes(e["bytes"]) for e in entries).decode() == reply.text()


async def test_logprobs_finish_reason_kept() -> None:
    reply = await make_client().chat(stream=True, logprobs=True, max_tokens=4)
    assert reply.reasons() == ["length"]


async def test_logprobs_of_completions() -> None:
    reply = (await make_client().complete(logprobs=3)).json
    logprobs = reply["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == reply["choices"][0]["text"]
    assert logprobs["text_offset"][:3] == [0, 3, 5]
    assert all(len(top) == 3 for top in logprobs["top_logprobs"])


async def test_logprobs_bytes_are_utf8() -> None:
    text = "日本 \U0001f389"
    client = make_client(ScriptedGenerator(answer=lambda request: ids(text)))
    entries = (await client.chat(logprobs=True)).json["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == text
