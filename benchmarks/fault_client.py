"""A client that keeps every byte with the moment it came, and looks at them when the run is over.

One connection a request, so that the end of an answer is the end of its connection: an answer is whole only
if HTTP's own framing says so. Nothing is decoded while streams run: the client must not be what is slow.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import orjson

PATH = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `seed` None: greedy."""

    prompt: tuple[int, ...]  # token ids
    max_tokens: int
    seed: int | None = None
    top_p: float = 1.0
    salt: str = ""  # other salts find nothing in each other's cache; they get the same answer
    stream: bool = True
    named_tokens: bool = False  # every token by itself (logprobs); else words are tokens, as `sim` has it
    stop: str | None = None  # a stop string
    stops_after: int | None = None  # so many tokens: the last of them completes `stop` and is not shown
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @property
    def n_tokens(self) -> int:
        """That are generated, and billed."""
        return self.max_tokens if self.stops_after is None else self.stops_after

    @property
    def n_shown(self) -> int:
        return self.max_tokens if self.stops_after is None else self.stops_after - 1

    @property
    def finish(self) -> str:
        return "length" if self.stops_after is None else "stop"

    def request(self, model: str) -> bytes:
        body: dict[str, Any] = {
            "model": model,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0 if self.seed is None else 1,
            "ignore_eos": True,
            "stream": self.stream,
        }
        if self.seed is not None:
            body["seed"] = self.seed
            body["top_p"] = self.top_p
        if self.salt:
            body["cache_salt"] = self.salt
        if self.named_tokens:
            body["logprobs"] = 0
        if self.stop is not None:
            body["stop"] = self.stop
        for name in ("presence_penalty", "frequency_penalty"):
            if value := getattr(self, name):
                body[name] = value
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        payload = orjson.dumps(body)
        head = (
            f"POST {PATH} HTTP/1.1\r\nHost: faults\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
        )
        return head.encode() + payload


@dataclass(slots=True)
class Answer:
    """What came of one request. Times are CLOCK_MONOTONIC seconds."""

    ask: Ask
    sent_s: float
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    whole: bool = False  # framing, terminal event and all
    tokens: list[str] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)  # when each token came
    usage: dict[str, Any] | None = None
    finish: str | None = None
    error: str | None = None  # what the server or the socket said
    ended_s: float = 0.0

    @property
    def decode_worker(self) -> str:
        """The one that was chosen first."""
        return self.headers.get("x-kvrelay-decode", "")

    @property
    def prefill_worker(self) -> str:
        return self.headers.get("x-kvrelay-prefill", "")


class Exchange(asyncio.Protocol):
    """One request on one connection; `ended` is set when the connection is gone."""

    def __init__(self, ask: Ask, model: str) -> None:
        self.ask = ask
        self.sent_s = 0.0
        self.arrivals: list[tuple[float, bytes]] = []
        self.n_events = 0  # about: enough to see that a stream is under way
        self.ended = asyncio.Event()
        self.error: str | None = None
        self._request = ask.request(model)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.sent_s = time.monotonic()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.arrivals.append((time.monotonic(), data))
        self.n_events += data.count(b"data: ")

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self.error = f"{type(exc).__name__}: {exc}"
        self.ended.set()

    def hang_up(self) -> None:
        """Leave without a word, as a closed browser tab does."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def decode_worker(self) -> str | None:
        """Known once the stream has begun; for whoever picks a victim."""
        head = self.arrivals[0][1] if self.arrivals else b""
        _, found, rest = head.partition(b"x-kvrelay-decode: ")
        return rest.partition(b"\r\n")[0].decode() if found else None

    def answer(self) -> Answer:
        """Everything that came, decoded."""
        answer = Answer(self.ask, self.sent_s, error=self.error)
        if self.arrivals:
            answer.ended_s = self.arrivals[-1][0]
        try:
            _read(self.arrivals, answer)
        except (ValueError, KeyError, IndexError) as error:
            answer.error = f"unreadable: {type(error).__name__}: {error}"
        return answer


async def send(host: str, port: int, ask: Ask, model: str) -> Exchange:
    """Connected and sent; a refused connection is an exchange that ended."""
    exchange = Exchange(ask, model)
    try:
        await asyncio.get_running_loop().create_connection(lambda: exchange, host, port)
    except OSError as error:
        exchange.sent_s = time.monotonic()
        exchange.error = f"{type(error).__name__}: {error}"
        exchange.ended.set()
    return exchange


# ---------------------------------------------------------------- HTTP


def _read(arrivals: list[tuple[float, bytes]], answer: Answer) -> None:
    """Head, then events or one object."""
    head, body, framed = b"", bytearray(), False
    times: list[tuple[int, float]] = []  # (length of the body by then, when)
    pending = b""
    chunked, expected = False, 0
    for at_s, data in arrivals:
        pending += data
        if not head:
            head, found, rest = pending.partition(b"\r\n\r\n")
            if not found:
                head = b""
                continue
            pending = rest
            chunked, expected = _take_head(head, answer)
        if chunked:
            pending, ended = _take_chunks(pending, body)
            framed = framed or ended
        else:
            body += pending
            pending = b""
            framed = len(body) >= expected
        times.append((len(body), at_s))
    if answer.status != 200:
        answer.error = answer.error or f"HTTP {answer.status}: {bytes(body[:200])!r}"
    elif answer.ask.stream:
        _take_events(bytes(body), times, answer)
        answer.whole = answer.whole and framed
    elif framed:
        _take_object(bytes(body), answer)


def _take_head(head: bytes, answer: Answer) -> tuple[bool, int]:
    """(chunked, content-length)."""
    first, *lines = head.decode("latin-1").split("\r\n")
    answer.status = int(first.split(" ")[1])
    for line in lines:
        name, _, value = line.partition(":")
        answer.headers[name.strip().lower()] = value.strip()
    chunked = answer.headers.get("transfer-encoding", "").lower() == "chunked"
    return chunked, int(answer.headers.get("content-length", 0))


def _take_chunks(data: bytes, body: bytearray) -> tuple[bytes, bool]:
    """Moves whole chunks to `body`; (what is left, the last chunk came)."""
    while True:
        size_text, found, rest = data.partition(b"\r\n")
        if not found:
            return data, False
        size = int(size_text, 16)
        if size == 0:
            return b"", True
        if len(rest) < size + 2:
            return data, False
        body += rest[:size]
        data = rest[size + 2 :]


# ---------------------------------------------------------------- what the server says


def _take_events(body: bytes, times: list[tuple[int, float]], answer: Answer) -> None:
    moments = iter(times)
    until, at_s = next(moments, (0, 0.0))
    end = 0
    for event in _events(body):
        end += len(event) + 2
        while until < end:
            until, at_s = next(moments)
        if not event.startswith(b"data: "):
            continue  # a comment that keeps the connection alive
        if event == b"data: [DONE]":
            answer.whole = answer.finish is not None
            continue
        said = orjson.loads(event[6:])
        if "error" in said:
            answer.error = str(said["error"])
            continue
        answer.usage = said.get("usage") or answer.usage
        for choice in said["choices"]:
            _take_choice(choice, at_s, answer)


def _events(body: bytes) -> Iterator[bytes]:
    """Whole ones."""
    *events, _ = body.split(b"\n\n")
    yield from events


def _take_choice(choice: dict[str, Any], at_s: float, answer: Answer) -> None:
    logprobs = choice.get("logprobs")
    tokens = logprobs["tokens"] if logprobs else choice["text"].split(" ")[1:]
    if logprobs and [value is None for value in logprobs["token_logprobs"]] != [False] * len(tokens):
        answer.error = "a token without its logprob"
    answer.tokens += tokens
    answer.times_s += [at_s] * len(tokens)
    answer.finish = choice["finish_reason"] or answer.finish


def _take_object(body: bytes, answer: Answer) -> None:
    said = orjson.loads(body)
    for choice in said["choices"]:
        _take_choice(choice, answer.ended_s, answer)
    answer.usage = said["usage"]
    answer.whole = answer.finish is not None
