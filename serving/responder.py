"""Tokens to HTTP: what the streamed and the collected response have in common.

A response has one choice a prompt. Each choice is the Sink of one generation: it turns tokens into text,
ends on a stop string (then it cancels the generation upstream) and counts what `usage` shows. The two kinds
of response differ only in what they do with the text. All runs inside the caller's callback, on one loop.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from serving.detokenize import Detokenizer, LogprobEntry, Vocabulary
from serving.engine.base import FinishReason, TokenLogprobs
from serving.errors import KVRelayError, RequestError, WorkerLost
from serving.generation import GenerationRequest, Generator, Ticket
from serving.sse import Envelope, Usage

_log = logging.getLogger("kvrelay.api")

Headers = list[tuple[bytes, bytes]]


@dataclass(slots=True)
class Piece:
    """One choice to answer."""

    n_prompt: int  # tokens
    request: GenerationRequest | None  # None: nothing to generate (echo with max_tokens 0)
    echo: str = ""  # text that goes before the answer
    stop: list[str] = field(default_factory=list)
    hidden: frozenset[int] = frozenset()  # tokens that end the answer and are no part of its text


class Response(ABC):
    """Base of both kinds.

    Attributes:
        done: settled when nothing more will happen; look at `error` then.
        error: why it failed; when `answered` is still false, the caller turns it into the HTTP answer.
        answered: the HTTP status is out.
        first_token_at: loop time of the first token.
    """

    def __init__(self, envelope: Envelope, pieces: Sequence[Piece], vocabulary: Vocabulary) -> None:
        self.envelope = envelope
        self.vocabulary = vocabulary
        self.error: KVRelayError | None = None
        self.answered = False
        self.first_token_at: float | None = None
        self.pieces = pieces
        self.choices = [self._new_choice(i, piece) for i, piece in enumerate(pieces)]
        self.open = len(self.choices)  # choices that have not ended
        self.begun = False  # every generation was started, so every ticket is known
        self._loop = asyncio.get_running_loop()

    @property
    @abstractmethod
    def done(self) -> asyncio.Future[None]: ...

    def begin(self, generator: Generator) -> None:
        """Start every generation. Does not raise: a refusal ends the response with `error`."""
        try:
            for choice, piece in zip(self.choices, self.pieces, strict=True):
                if piece.request is None:
                    choice.on_finish(FinishReason.LENGTH)
                    continue
                choice.ticket = generator.start(piece.request, choice)
                if choice.ended:  # it ended before its ticket was known
                    choice.ticket.cancel()
                if self.done.done():
                    return
        except KVRelayError as error:
            self.fail(error)
            return
        self.begun = True
        if self.open == 0:
            self._complete(b"")

    def cancel(self) -> None:
        """End every generation upstream; idempotent."""
        for choice in self.choices:
            choice.ended = True
            if choice.ticket is not None:
                choice.ticket.cancel()

    def abandon(self) -> None:
        """Give up without another word: the client is gone, or the response is over. Idempotent."""
        self.cancel()

    def fail(self, error: KVRelayError) -> None:
        """The whole response fails with the first error of any choice; later ones are ignored."""
        if self.error is not None or self.done.done():
            return
        self.error = error
        self.cancel()
        self._failed(error)

    def choice_ended(self, last: bytes) -> None:
        """`last`: what the choice still has to say, for a stream."""
        self.open -= 1
        if self.open == 0 and self.begun:
            self._complete(last)
        elif last:
            self._say(last)

    @property
    def placement(self) -> Headers:
        """Which workers answer the first choice and how many of its prompt tokens they had cached."""
        ticket = self.choices[0].ticket if self.choices else None
        if ticket is None:
            return []
        info = ticket.info
        return [
            (b"x-kvrelay-prefill", (info.prefill_worker or "").encode()),
            (b"x-kvrelay-decode", (info.decode_worker or "").encode()),
            (b"x-kvrelay-cached-tokens", str(info.cached_tokens).encode()),
        ]

    @property
    def usage(self) -> Usage:
        usage = Usage(prompt_tokens=sum(piece.n_prompt for piece in self.pieces))
        for choice in self.choices:
            usage.completion_tokens += choice.detokenizer.n_tokens
            if choice.ticket is not None:
                usage.cached_tokens += choice.ticket.info.cached_tokens
        return usage

    @property
    def finish(self) -> str | None:
        """The reasons of all choices, for the access log."""
        return ",".join(choice.reason or "?" for choice in self.choices) if self.error is None else None

    def token_came(self) -> None:
        if self.first_token_at is None:
            self.first_token_at = self._loop.time()

    @abstractmethod
    def _new_choice(self, index: int, piece: Piece) -> Choice: ...

    @abstractmethod
    def _say(self, data: bytes) -> None: ...

    @abstractmethod
    def _complete(self, last: bytes) -> None: ...

    @abstractmethod
    def _failed(self, error: KVRelayError) -> None: ...


class Choice(ABC):
    """The sink of one generation.

    Attributes:
        ended: the answer is complete or given up; whatever still comes is ignored.
        reason: why the answer ended.
    """

    def __init__(self, response: Response, piece: Piece) -> None:
        self.response = response
        request = piece.request
        min_tokens = 0 if request is None else request.params.min_tokens
        self.detokenizer = Detokenizer(
            response.vocabulary, piece.stop, hidden=piece.hidden, min_tokens=min_tokens
        )
        self.echo = piece.echo
        self.wants_logprobs = request is not None and request.params.logprobs is not None
        self.ticket: Ticket | None = None
        self.ended = False
        self.reason: FinishReason | None = None

    @property
    def redrawn_from(self) -> int | None:
        return None if self.ticket is None else self.ticket.info.redrawn_from

    def on_tokens(self, tokens: list[int], logprobs: list[TokenLogprobs] | None) -> None:
        if self.ended or not tokens:
            return
        try:
            if self.response.first_token_at is None:
                self.response.token_came()
            detokenizer = self.detokenizer
            if not self.wants_logprobs:
                self._take(detokenizer.push(tokens))
            else:
                before = detokenizer.n_tokens
                text = detokenizer.push(tokens)
                used = (logprobs or [])[: detokenizer.n_tokens - before]
                self._take_with_logprobs(text, self.response.vocabulary.entries(used))
            if detokenizer.stopped:
                self._end(FinishReason.STOP, "")
                if self.ticket is not None:
                    self.ticket.cancel(FinishReason.STOP.value)
        except Exception:
            self._broken()

    def on_finish(self, reason: FinishReason) -> None:
        if self.ended:
            return
        try:
            tail = self.detokenizer.flush()
            self._end(FinishReason.STOP if self.detokenizer.stopped else reason, tail)
        except Exception:
            self._broken()

    def on_error(self, error: KVRelayError) -> None:
        if not self.ended:
            self.response.fail(error)

    def _broken(self) -> None:
        """A sink must not raise into the link's frame handler: our own fault fails this request only."""
        _log.exception("response %s: internal error", self.response.envelope.id)
        self.response.fail(internal_error())

    @abstractmethod
    def _take(self, text: str) -> None: ...

    @abstractmethod
    def _take_with_logprobs(self, text: str, entries: list[LogprobEntry]) -> None: ...

    @abstractmethod
    def _end(self, reason: FinishReason, tail: str) -> None: ...


def internal_error() -> KVRelayError:
    return KVRelayError("internal error; the server's log has the details")


def public_error(error: KVRelayError, response_id: str) -> KVRelayError:
    """What the client may see of `error`: nothing of what went wrong inside a worker or in here."""
    if isinstance(error, WorkerLost):
        shown: KVRelayError = WorkerLost("the worker was lost and no other could go on; try again")
    elif isinstance(error, RequestError) or error.status != KVRelayError.status:
        return error
    else:
        shown = internal_error()
    _log.error("response %s: %s: %s", response_id, type(error).__name__, error.message)
    return shown
