"""A response as server-sent events, each sent from within the sink's callback."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from serving.detokenize import LogprobEntry, Vocabulary
from serving.eager import EagerSender, Send
from serving.engine.base import FinishReason
from serving.errors import KVRelayError, Overloaded
from serving.responder import Choice, Headers, Piece, Response, public_error
from serving.sse import DONE, KEEP_ALIVE, ChunkWriter, Envelope, error_event, usage_event


class StreamedResponse(Response):
    """Server-sent events.

    Nothing goes out before the first token or keep-alive, so that an earlier error is a proper HTTP status;
    then the head and the first event leave together.
    """

    def __init__(
        self,
        envelope: Envelope,
        pieces: Sequence[Piece],
        vocabulary: Vocabulary,
        *,
        send: Send,
        headers: Headers,
        include_usage: bool,
        keep_alive_s: float,
    ) -> None:
        self.include_usage = include_usage
        self._sender = EagerSender(send, self._client_too_slow)
        self._headers = headers
        super().__init__(envelope, pieces, vocabulary)
        self._tick_s = keep_alive_s / 2  # quiet for one whole tick: a comment goes out within two
        self._timer = self._loop.call_later(self._tick_s, self._tick)

    @property
    def done(self) -> asyncio.Future[None]:
        return self._sender.closed

    def write(self, data: bytes) -> None:
        self._begin()
        self._sender.write(data)

    def abandon(self) -> None:
        super().abandon()
        self._timer.cancel()
        self._sender.abandon()

    def _new_choice(self, index: int, piece: Piece) -> Choice:
        writer = ChunkWriter(self.envelope, index, with_usage=self.include_usage)
        return StreamedChoice(self, piece, writer)

    def _say(self, data: bytes) -> None:
        self.write(data)

    def _complete(self, last: bytes) -> None:
        self._timer.cancel()
        if self.include_usage:
            last += usage_event(self.envelope, self.usage)
        self._end(last + DONE)

    def _failed(self, error: KVRelayError) -> None:
        self._timer.cancel()
        if self.answered:
            self._end(error_event(public_error(error, self.envelope.id)))
        else:
            self._sender.abandon()  # nothing was sent: the caller answers

    def _end(self, data: bytes) -> None:
        self._begin()
        self._sender.end(data)

    def _begin(self) -> None:
        if not self.answered:
            self.answered = True
            self._sender.start(200, self._headers + self.placement)

    def _client_too_slow(self) -> None:
        self.fail(Overloaded("the client reads too slowly"))

    def _tick(self) -> None:
        if self.done.done():
            return
        if not self._sender.wrote:
            self.write(KEEP_ALIVE)
        self._sender.wrote = False
        self._timer = self._loop.call_later(self._tick_s, self._tick)


class StreamedChoice(Choice):
    def __init__(self, response: StreamedResponse, piece: Piece, writer: ChunkWriter) -> None:
        super().__init__(response, piece)
        self._write = response.write
        self._writer = writer
        self._started = False

    def _take(self, text: str) -> None:
        if not self._started:
            self._write(self._start() + (self._writer.text(text) if text else b""))
        elif text:
            self._write(self._writer.text(text))

    def _take_with_logprobs(self, text: str, entries: list[LogprobEntry]) -> None:
        self._write(self._start() + self._writer.text_with_logprobs(text, entries))

    def _end(self, reason: FinishReason, tail: str) -> None:
        self.ended = True
        self.reason = reason
        tail_chunk = self._writer.text(tail) if tail else b""
        self.response.choice_ended(
            self._start() + tail_chunk + self._writer.finish(reason, self.redrawn_from)
        )

    def _start(self) -> bytes:
        if self._started:
            return b""
        self._started = True
        return self._writer.start() + (self._writer.text(self.echo) if self.echo else b"")
