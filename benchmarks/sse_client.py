"""A streaming load generator that costs little CPU: raw sockets, as an ordinary client opens them.

`python -m benchmarks.sse_client --help`. Runs as a process of its own, so that its CPU is not the server's.
Simulated models say one space and one word a token: tokens are counted by their spaces.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import uvloop

# Every event starts with a space of its own, after "data:"; it is no token.
_EVENT_STARTS = (b": {", b": [")


@dataclass(slots=True)
class Stream:
    """What one stream brought. Times are CLOCK_MONOTONIC seconds."""

    sent_s: float = 0.0
    first_s: float | None = None
    last_s: float = 0.0
    tokens: int = 0
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # (time, tokens that came with it)
    status: int = 0

    @property
    def ttft_s(self) -> float:
        return (self.first_s or math.inf) - self.sent_s


class SseConnection(asyncio.Protocol):
    """One keep-alive connection; `request` one stream at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[Stream] | None = None
        self._stream = Stream()
        self._head = True
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def request(self, data: bytes) -> asyncio.Future[Stream]:
        assert self._transport is not None
        self._stream = Stream(sent_s=time.monotonic())
        self._head = True
        self._tail = b""
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        return self._done

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        stream = self._stream
        if self._head:
            data = self._tail + data
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._tail = data
                return
            self._head = False
            stream.status = int(data[9:12])
            data, self._tail = data[end + 4 :], b""
        spaces = data.count(b" ")
        if spaces:
            joined = self._tail + data
            tokens = spaces - joined.count(_EVENT_STARTS[0]) - joined.count(_EVENT_STARTS[1])
            if tokens > 0:
                if stream.first_s is None:
                    stream.first_s = now
                stream.tokens += tokens
                stream.last_s = now
                stream.arrivals.append((now, tokens))
        if data.endswith(b"0\r\n\r\n") and self._done is not None and not self._done.done():
            self._done.set_result(stream)
        self._tail = data[-2:]

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError(f"cut after {self._stream.tokens} tokens: {exc}"))


def request_bytes(path: str, body: dict[str, Any]) -> bytes:
    payload = json.dumps(body).encode()
    return (
        f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\n\r\n"
    ).encode() + payload


def lateness_ms(stream: Stream, period_s: float) -> list[float]:
    """How late each decode token came, against the worker's own schedule.

    A paced worker emits on multiples of `period_s` of CLOCK_MONOTONIC and never skips one, so the slot of
    the first decode token is the latest multiple that no token of the stream precedes; token i is due i
    slots later. The first token (prefill's) is on no schedule.
    """
    times: list[float] = []
    for at_s, tokens in stream.arrivals:
        times += [at_s] * tokens
    decode = times[1:]
    if not decode:
        return []
    first = min(at_s - i * period_s for i, at_s in enumerate(decode))
    slot_s = math.floor(first / period_s) * period_s
    return [(at_s - slot_s - i * period_s) * 1e3 for i, at_s in enumerate(decode)]


def quantile(values: list[float], q: float) -> float | None:
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * q))], 4) if ordered else None


async def run_streams(
    host: str,
    port: int,
    make_request: Callable[[int], bytes],
    *,
    connections: int,
    requests: int,
    ramp_s: float,
) -> list[Stream]:
    """`requests` streams one after another on each of `connections` connections, started over `ramp_s`."""
    loop = asyncio.get_running_loop()

    async def client(index: int) -> list[Stream]:
        await asyncio.sleep(ramp_s * index / connections)
        transport, connection = await loop.create_connection(SseConnection, host, port)
        try:
            return [await connection.request(make_request(index * requests + n)) for n in range(requests)]
        finally:
            transport.close()

    results = await asyncio.gather(*(client(index) for index in range(connections)))
    return [stream for streams in results for stream in streams]


def steady_rate(streams: list[Stream]) -> float | None:
    """Tokens a second while every stream was alive; None if they never all were."""
    from_s = max(stream.first_s or math.inf for stream in streams)
    until_s = min(stream.last_s for stream in streams)
    if from_s >= until_s:
        return None
    tokens = sum(n for stream in streams for at_s, n in stream.arrivals if from_s < at_s <= until_s)
    return round(tokens / (until_s - from_s), 1)


def summary(streams: list[Stream], expected_tokens: int, period_s: float | None) -> dict[str, Any]:
    began = min(stream.sent_s for stream in streams)
    ended = max(stream.last_s for stream in streams)
    tokens = sum(stream.tokens for stream in streams)
    result: dict[str, Any] = {
        "streams": len(streams),
        "complete": sum(stream.tokens == expected_tokens for stream in streams),
        "statuses": sorted({stream.status for stream in streams}),
        "tokens": tokens,
        "seconds": round(ended - began, 3),
        "tok_s": round(tokens / (ended - began), 1),
        "steady_tok_s": steady_rate(streams),
        "ttft_ms_p50": quantile([stream.ttft_s * 1e3 for stream in streams], 0.5),
        "ttft_ms_p90": quantile([stream.ttft_s * 1e3 for stream in streams], 0.9),
        "request_ms_p50": quantile([(s.last_s - s.sent_s) * 1e3 for s in streams], 0.5),
    }
    if period_s is not None:
        late = [value for stream in streams for value in lateness_ms(stream, period_s)]
        # A token that never came is as late as can be.
        late += [math.inf] * (len(streams) * (expected_tokens - 1) - len(late))
        result["on_time"] = round(sum(value <= 60 for value in late) / len(late), 4)
        result["delay_ms_p50"] = quantile(late, 0.5)
        result["delay_ms_p99"] = quantile(late, 0.99)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sse_client", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--path", default="/v1/chat/completions")
    parser.add_argument("--model", required=True)
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--requests", type=int, default=1, help="streams one after another per connection")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--ramp-s", type=float, default=0.0)
    parser.add_argument("--period-ms", type=float, help="pace of the worker; adds the tokens on time")
    options = parser.parse_args()

    def make_request(n: int) -> bytes:
        message = {"role": "user", "content": f"Request {n}: how long does a token take, all in all?"}
        body = {"model": options.model, "messages": [message], "max_tokens": options.tokens, "stream": True}
        return request_bytes(options.path, body)

    streams = uvloop.run(
        run_streams(
            options.host,
            options.port,
            make_request,
            connections=options.connections,
            requests=options.requests,
            ramp_s=options.ramp_s,
        )
    )
    period_s = options.period_ms / 1e3 if options.period_ms else None
    print(json.dumps(summary(streams, options.tokens, period_s)))


if __name__ == "__main__":
    main()
