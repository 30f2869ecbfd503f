"""A response as one JSON body, when everything is there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from serving.detokenize import LogprobEntry, Vocabulary
from serving.engine.base import FinishReason
from serving.errors import KVRelayError
from serving.responder import Choice, Piece, Response
from serving.sse import Answer, Envelope, response_body


class CollectedResponse(Response):
    """One JSON body at the end; `body` is valid when `done` is settled without `error`."""

    def __init__(self, envelope: Envelope, pieces: Sequence[Piece], vocabulary: Vocabulary) -> None:
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        super().__init__(envelope, pieces, vocabulary)

    @property
    def done(self) -> asyncio.Future[None]:
        return self._done

    @property
    def body(self) -> bytes:
        answers = [choice.answer for choice in self.choices if isinstance(choice, CollectedChoice)]
        return response_body(self.envelope, answers, self.usage)

    def _new_choice(self, index: int, piece: Piece) -> Choice:
        return CollectedChoice(self, piece)

    def _say(self, data: bytes) -> None:
        """Nothing is said before the end."""

    def _complete(self, last: bytes) -> None:
        self._settle()

    def _failed(self, error: KVRelayError) -> None:
        self._settle()

    def _settle(self) -> None:
        if not self._done.done():
            self._done.set_result(None)


class CollectedChoice(Choice):
    def __init__(self, response: CollectedResponse, piece: Piece) -> None:
        super().__init__(response, piece)
        self._texts = [self.echo]
        self._entries: list[LogprobEntry] | None = [] if self.wants_logprobs else None

    @property
    def answer(self) -> Answer:
        assert self.reason is not None
        return Answer("".join(self._texts), self.reason, self._entries, self.redrawn_from)

    def _take(self, text: str) -> None:
        self._texts.append(text)

    def _take_with_logprobs(self, text: str, entries: list[LogprobEntry]) -> None:
        self._texts.append(text)
        assert self._entries is not None
        self._entries.extend(entries)

    def _end(self, reason: FinishReason, tail: str) -> None:
        self.ended = True
        self.reason = reason
        self._texts.append(tail)
        self.response.choice_ended(b"")
