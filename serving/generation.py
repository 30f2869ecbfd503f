"""What the API asks of the coordinator: one request, a sink that is called as tokens come.

Everything here happens on one event loop. A sink is called synchronously from the link's frame handler
(no task wakes for a token), so its methods must be short and must not raise.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Protocol

from serving.engine.base import FinishReason, SamplingParams, TokenLogprobs
from serving.errors import KVRelayError


@dataclass(slots=True)
class GenerationRequest:
    """A validated request: `len(prompt) + params.max_tokens` fits the model's context."""

    request_id: str
    model: str  # served name
    prompt: array[int]  # 'I', at least one token
    params: SamplingParams
    cache_salt: str = ""
    session: str | None = None
    timeout_ms: float | None = None  # the client's own limit, if it gave one
    priority: int = 0
    tenant: str | None = None  # the name of its API key, where keys are configured
    adapter: str | None = None  # a LoRA, by the name it is configured under
    slo_class: str | None = None  # of the model's `slo.classes`


@dataclass(slots=True)
class GenerationInfo:
    """Known when the first token is out; what `usage` and the response headers need.

    Attributes:
        resumes: how often it went on elsewhere after a fault.
        redrawn_from: the number of tokens after which a resume was another draw, of an engine without
            seeded resume; None: the answer is as if nothing had happened.
        variant: of the model, that answers.
    """

    cached_tokens: int = 0
    prefill_worker: str | None = None
    decode_worker: str | None = None
    resumes: int = 0
    redrawn_from: int | None = None
    variant: str | None = None


class Sink(Protocol):
    """Gets tokens in order of position, none twice, none left out; then exactly one terminal call."""

    def on_tokens(self, tokens: list[int], logprobs: list[TokenLogprobs] | None) -> None:
        """`logprobs` is parallel to `tokens` when the request asked for them, else None."""

    def on_finish(self, reason: FinishReason) -> None: ...

    def on_error(self, error: KVRelayError) -> None: ...


class Ticket(Protocol):
    """A running request."""

    info: GenerationInfo

    def cancel(self, outcome: str = "cancelled") -> None:
        """End it upstream and free everything; the sink gets no further call. Idempotent."""


class Generator(Protocol):
    def start(self, request: GenerationRequest, sink: Sink) -> Ticket:
        """Raises Overloaded, Unavailable. The sink may be called before this returns."""


@dataclass(slots=True)
class CollectedText:
    """A sink that only remembers, for tests and probes."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: FinishReason | None = None
    error: KVRelayError | None = None

    def on_tokens(self, tokens: list[int], logprobs: list[TokenLogprobs] | None) -> None:
        self.tokens.extend(tokens)
        self.logprobs.extend(logprobs or [])

    def on_finish(self, reason: FinishReason) -> None:
        self.reason = reason

    def on_error(self, error: KVRelayError) -> None:
        self.error = error
