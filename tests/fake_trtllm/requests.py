"""What the fake engine is asked for, and what a step has to say about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

CONTEXT_ONLY, GENERATION_ONLY, WHOLE = "context_only", "generation_only", "context_and_generation"
MIN_GLOBAL_ID = 1 << 40


@dataclass
class Response:
    """What a step has for one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish: str | None = None
    error: Exception | None = None
    handover: Any = None  # DisaggregatedParams of a context_only result


@dataclass(eq=False)
class Request:
    number: int
    ids: list[int]
    params: Any
    kind: str
    handed: Any  # DisaggregatedParams as given
    salt: str | None
    lora: Any
    streaming: bool
    output: Any  # RequestOutput
    tokens: list[int] = field(default_factory=list)
    told: int = 0
    logprobs: list[Any] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)  # of committed blocks it holds
    n_blocks: int = 0  # that it holds and nobody else does
    arrives_s: float | None = None  # a transfer under way; None: never
    fails: bool = False
    stage: str = "queued"  # queued, transfer, running
