"""The shapes that clients rely on, in both endpoints."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.detokenize import LogprobEntry, TokenText
from serving.engine.base import FinishReason
from serving.errors import InvalidRequest, error_body
from serving.sse import (
    Answer,
    ChunkWriter,
    Endpoint,
    Envelope,
    Usage,
    error_event,
    models_body,
    response_body,
    usage_event,
)
from tests.tiny_tokenizer import tiny_model

BOTH = pytest.mark.parametrize("endpoint", list(Endpoint), ids=lambda e: e.name.lower())
KINDS = {Endpoint.CHAT: "chat.completion", Endpoint.COMPLETION: "text_completion"}


def envelope(endpoint: Endpoint) -> Envelope:
    return Envelope(endpoint, "id-1", 1_700_000_000, 'a "quoted" model')


def parse(event: bytes) -> Any:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2, "an event is one line"
    return json.loads(event[6:])


@BOTH
@settings(deadline=None)
@given(text=st.text())
def test_any_text_survives(endpoint: Endpoint, text: str) -> None:
    choice = parse(ChunkWriter(envelope(endpoint), 3, with_usage=False).text(text))["choices"][0]
    got = choice["text"] if endpoint is Endpoint.COMPLETION else choice["delta"]["content"]
    assert got == text
    assert choice["index"] == 3


@BOTH
@pytest.mark.parametrize("with_usage", [True, False])
def test_every_chunk_has_its_keys(endpoint: Endpoint, with_usage: bool) -> None:
    writer = ChunkWriter(envelope(endpoint), 0, with_usage=with_usage)
    entries = [LogprobEntry(TokenText("x", b"x", -1.0), [])]
    events = [
        writer.start(),
        writer.text("x"),
        writer.text_with_logprobs("x", entries),
        writer.finish(FinishReason.STOP),
    ]
    for event in filter(None, events):
        chunk = parse(event)
        assert chunk["id"] == "id-1"
        assert chunk["model"] == 'a "quoted" model'
        assert chunk["object"].startswith(KINDS[endpoint])
        assert ("usage" in chunk) == with_usage
        (choice,) = chunk["choices"]
        assert {"index", "logprobs", "finish_reason"} <= set(choice)


@BOTH
def test_the_finish_stands_alone(endpoint: Endpoint) -> None:
    (choice,) = parse(ChunkWriter(envelope(endpoint), 0, with_usage=False).finish(FinishReason.LENGTH))[
        "choices"
    ]
    assert choice["finish_reason"] == "length"
    assert choice.get("delta") == {} if endpoint is Endpoint.CHAT else choice["text"] == ""


@BOTH
def test_usage_choices_field_present(endpoint: Endpoint) -> None:
    chunk = parse(usage_event(envelope(endpoint), Usage(10, 3, 8)))
    assert chunk["choices"] == []
    assert chunk["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 3,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 8},
    }


def test_an_error_event_has_the_http_shape() -> None:
    error = InvalidRequest("no", param="x")
    assert parse(error_event(error)) == error_body(error)


@BOTH
def test_a_response_in_one_piece(endpoint: Endpoint) -> None:
    answers = [Answer("a", FinishReason.STOP, None), Answer("b", FinishReason.LENGTH, [])]
    body = json.loads(response_body(envelope(endpoint), answers, Usage(1, 2, 0)))
    assert body["object"] == KINDS[endpoint]
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "length"]
    assert body["choices"][0]["logprobs"] is None
    assert body["choices"][1]["logprobs"] is not None


@BOTH
def test_an_impossible_token_has_a_number(endpoint: Endpoint) -> None:
    entry = LogprobEntry(TokenText("x", b"x", -math.inf), [TokenText("y", b"y", -math.inf)])
    writer = ChunkWriter(envelope(endpoint), 0, with_usage=False)
    assert b"-9999.0" in writer.text_with_logprobs("x", [entry])


def test_text_offsets_of_completions_count_characters() -> None:
    writer = ChunkWriter(envelope(Endpoint.COMPLETION), 0, with_usage=False)
    entries = [LogprobEntry(TokenText(t, t.encode(), -1.0), []) for t in ("\u20ac", "uro")]
    first = parse(writer.text_with_logprobs("\u20acuro", entries))["choices"][0]["logprobs"]
    second = parse(writer.text_with_logprobs("\u20acuro", entries))["choices"][0]["logprobs"]
    assert (first["text_offset"], second["text_offset"]) == ([0, 1], [4, 5])


def test_models() -> None:
    body = json.loads(models_body([tiny_model("a"), tiny_model("b")]))
    assert body["object"] == "list"
    assert [model["id"] for model in body["data"]] == ["a", "b"]
    assert {model["object"] for model in body["data"]} == {"model"}
    assert all(model["created"] and model["owned_by"] for model in body["data"])
