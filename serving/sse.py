"""OpenAI response objects and server-sent events: the only module that knows what they look like.

A stream's chunks differ only in their text, so everything around it is prebuilt once a request: a chunk is
`head + JSON string + tail`. Rules that clients rely on and that are kept here, for both endpoints: every
chunk has `choices`, every choice has `logprobs` and `finish_reason` (null until the end); the finish stands
alone in a chunk with an empty delta, once per choice; the first chat chunk carries the role; usage comes
last, before `[DONE]`; an error is an event in the HTTP error's shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import orjson

from serving.detokenize import LogprobEntry, TokenText
from serving.engine.base import FinishReason
from serving.errors import KVRelayError, error_body
from serving.served_model import ServedModel

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

_NO_LOGPROB = -9999.0  # OpenAI's number for "impossible"; JSON has no -Infinity
_MARK = "\x00text\x00"  # where the text goes when a chunk's frame is built


class Endpoint(Enum):
    CHAT = "/v1/chat/completions"
    COMPLETION = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all objects of one response share."""

    endpoint: Endpoint
    id: str
    created: int  # unix seconds
    model: str

    def to_json(self, *, chunk: bool) -> dict[str, Any]:
        if self.endpoint is Endpoint.COMPLETION:
            kind = "text_completion"
        else:
            kind = "chat.completion.chunk" if chunk else "chat.completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


@dataclass(slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class ChunkWriter:
    """Chunks of one choice of a stream, as bytes of whole events."""

    __slots__ = ("_after_text", "_before_text", "_envelope", "_index", "_text_offset", "_with_usage")

    def __init__(self, envelope: Envelope, index: int, *, with_usage: bool) -> None:
        """`with_usage`: a usage chunk will end the stream, so the others say `usage: null`."""
        self._envelope = envelope
        self._index = index
        self._with_usage = with_usage
        self._text_offset = 0  # characters sent, for the logprobs of completions
        frame = self._event(self._text_delta(_MARK), None, None)
        self._before_text, self._after_text = frame.split(orjson.dumps(_MARK))

    def start(self) -> bytes:
        """What precedes the first text: chat says the role, also of an empty answer."""
        if self._envelope.endpoint is Endpoint.COMPLETION:
            return b""
        return self._event({"delta": {"role": "assistant", "content": ""}}, None, None)

    def text(self, text: str) -> bytes:
        return self._before_text + orjson.dumps(text) + self._after_text

    def text_with_logprobs(self, text: str, entries: Sequence[LogprobEntry]) -> bytes:
        """`text` may be empty: each token's entry leaves with the token, its text maybe later."""
        logprobs = logprobs_json(self._envelope.endpoint, entries, self._text_offset)
        self._text_offset += len(text)
        return self._event(self._text_delta(text), logprobs, None)

    def finish(self, reason: FinishReason, redrawn_from: int | None = None) -> bytes:
        """`redrawn_from`: see GenerationInfo; it is said when there is something to say."""
        empty: dict[str, Any] = {"delta": {}} if self._envelope.endpoint is Endpoint.CHAT else {"text": ""}
        return self._event({**empty, **redrawn(redrawn_from)}, None, reason)

    def _text_delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}} if self._envelope.endpoint is Endpoint.CHAT else {"text": text}

    def _event(
        self, delta: dict[str, Any], logprobs: dict[str, Any] | None, reason: FinishReason | None
    ) -> bytes:
        choice = {"index": self._index, **delta, "logprobs": logprobs, "finish_reason": reason}
        chunk = {**self._envelope.to_json(chunk=True), "choices": [choice]}
        if self._with_usage:
            chunk["usage"] = None
        return event(chunk)


def redrawn(from_token: int | None) -> dict[str, Any]:
    """A field of the choice that marks a resumed answer which is another draw from there on."""
    return {} if from_token is None else {"kvrelay_redrawn_from": from_token}


def usage_event(envelope: Envelope, usage: Usage) -> bytes:
    return event({**envelope.to_json(chunk=True), "choices": [], "usage": usage.to_json()})


def error_event(error: KVRelayError) -> bytes:
    return event(error_body(error))


def event(content: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"


@dataclass(slots=True)
class Answer:
    """One choice of a response that is not streamed."""

    text: str
    reason: FinishReason
    logprobs: list[LogprobEntry] | None
    redrawn_from: int | None = None


def response_body(envelope: Envelope, answers: Sequence[Answer], usage: Usage) -> bytes:
    """The whole response; choice i is `answers[i]`."""
    choices = []
    for index, answer in enumerate(answers):
        entries = answer.logprobs
        logprobs = None if entries is None else logprobs_json(envelope.endpoint, entries, 0)
        content: dict[str, Any] = {"text": answer.text}
        if envelope.endpoint is Endpoint.CHAT:
            content = {"message": {"role": "assistant", "content": answer.text, "refusal": None}}
        content |= redrawn(answer.redrawn_from)
        choices.append({"index": index, **content, "logprobs": logprobs, "finish_reason": answer.reason})
    return orjson.dumps({**envelope.to_json(chunk=False), "choices": choices, "usage": usage.to_json()})


def logprobs_json(endpoint: Endpoint, entries: Sequence[LogprobEntry], text_offset: int) -> dict[str, Any]:
    """`text_offset`: characters of the answer before the first entry."""
    if endpoint is Endpoint.CHAT:
        content = [{**_token(e.chosen), "top_logprobs": [_token(top) for top in e.top]} for e in entries]
        return {"content": content, "refusal": None}
    offsets = []
    for entry in entries:
        offsets.append(text_offset)
        text_offset += len(entry.chosen.raw.decode("utf-8", "ignore"))
    return {
        "tokens": [e.chosen.text for e in entries],
        "token_logprobs": [_finite(e.chosen.logprob) for e in entries],
        "top_logprobs": [{top.text: _finite(top.logprob) for top in e.top} for e in entries],
        "text_offset": offsets,
    }


def _token(token: TokenText) -> dict[str, Any]:
    return {"token": token.text, "logprob": _finite(token.logprob), "bytes": list(token.raw)}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _NO_LOGPROB


Variants = Callable[[str], list[dict[str, Any]]]  # of a model's name: serving.provenance.merged


def models_body(models: Sequence[ServedModel], variants: Variants | None = None) -> bytes:
    return orjson.dumps({"object": "list", "data": [_model(model, variants) for model in models]})


def model_body(model: ServedModel, variants: Variants | None = None) -> bytes:
    return orjson.dumps(_model(model, variants))


def _model(model: ServedModel, variants: Variants | None) -> dict[str, Any]:
    ours = {"kvrelay": {"variants": variants(model.name)}} if variants is not None else {}
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "kvrelay",
        "max_model_len": model.context_tokens,
        **ours,
    }
