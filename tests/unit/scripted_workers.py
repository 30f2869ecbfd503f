"""Clients and workers whose tokens are known before they are drawn: what a coordinator is tried against."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from serving.engine.base import FinishReason, TokenLogprobs
from serving.errors import EngineFailure, KVRelayError
from serving.run import Run, WorkerEntry
from serving.wire import Begun, Ended, Message, Step, Submit, Tokens, pack_u32, pack_u64

T = TypeVar("T")


def pick(things: Sequence[T], place: int) -> T:
    return things[place % len(things)]


class Client:
    """The sink of one request, and what it must get. Token `i` of request `n` is always 1000 n + i."""

    def __init__(self, number: int, max_tokens: int, stops_at: int | None, hangs_up_at: int | None) -> None:
        """It comes to its end with token `stops_at`; this client finds a stop string at `hangs_up_at`."""
        self.number = number
        self.max_tokens = max_tokens
        stopped = stops_at is not None and stops_at <= max_tokens
        self.length = stops_at if stops_at is not None and stopped else max_tokens
        self.reason = FinishReason.STOP if stopped else FinishReason.LENGTH
        self.hangs_up_at = hangs_up_at
        self.tokens: list[int] = []
        self.ends: list[FinishReason | KVRelayError] = []
        self.cancelled = False
        self.harmed = False  # something went wrong that it may hear of
        self.refused = False  # some engine said that it is the request
        self.run: Run | None = None

    def token(self, position: int) -> int:
        return 1000 * self.number + position

    @property
    def over(self) -> bool:
        return self.cancelled or bool(self.ends)

    # -- Sink

    def on_tokens(self, tokens: list[int], logprobs: list[TokenLogprobs] | None) -> None:
        assert not self.over
        assert tokens
        self.tokens += tokens
        if self.hangs_up_at is not None and len(self.tokens) >= self.hangs_up_at:
            self.cancelled = True
            assert self.run is not None
            self.run.cancel("stop")

    def on_finish(self, reason: FinishReason) -> None:
        assert not self.over
        self.ends.append(reason)

    def on_error(self, error: KVRelayError) -> None:
        assert not self.over
        self.ends.append(error)

    # -- what must hold

    def check(self) -> None:
        assert self.tokens == [self.token(i) for i in range(len(self.tokens))]
        assert len(self.tokens) <= self.length
        for end in self.ends:
            if isinstance(end, KVRelayError):
                assert self.harmed, repr(end)
                assert not isinstance(end, EngineFailure) or self.refused
            else:
                assert (end, len(self.tokens)) == (self.reason, self.length)


@dataclass
class Held:
    """An attempt on a worker."""

    submit: Submit
    client: Client
    drawn: int  # tokens of the answer that it knows of
    begun: bool = False
    leased: bool = False  # a prefill's KV, which waits for its reader

    @property
    def attempt(self) -> int:
        return self.submit.attempt


@dataclass
class ScriptedWorker:
    ident: str
    entry: WorkerEntry
    held: dict[int, Held] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)  # attempts that came to their end here
    inbox: deque[Message] = field(default_factory=deque)
    outbox: deque[Step] = field(default_factory=deque)
    linked: bool = True
    draining: bool = False

    def end(self, attempt: int, reason: str = "", error: str | None = None, retryable: bool = True) -> None:
        del self.held[attempt]
        self.outbox.append(Step(ended=[Ended(attempt, reason, error, retryable)]))

    def draw(self, held: Held, count: int, ends_apart: bool) -> None:
        """Up to `count` more tokens, and the end if they reach it: in one frame, as an engine has it, or
        `ends_apart`."""
        client = held.client
        count = min(count, client.length - held.drawn)
        positions = list(range(held.drawn, held.drawn + count))
        held.drawn += count
        ended = None
        ends_apart = ends_apart and client.reason is FinishReason.LENGTH
        if held.drawn >= client.length:
            del self.held[held.attempt]
            self.finished.add(held.attempt)
            ended = [Ended(held.attempt, client.reason.value)]
        frame = Step(
            begun=None if held.begun else [Begun(held.attempt, 0)],
            tokens=Tokens(
                pack_u64([held.attempt] * count),
                pack_u32(positions),
                pack_u32([client.token(i) for i in positions]),
            ),
            ended=None if ends_apart else ended,
        )
        held.begun = True
        self.outbox.append(frame)
        if ends_apart and ended is not None:
            self.outbox.append(Step(ended=ended))
