"""Sends a trace to a running application at the trace's own times, and tells what every request met.

`python -m benchmarks.trace_client --help`; prints one JSON object. Runs as a process of its own, so that
its CPU is not the server's. A trace has lengths and prefix hashes, no text: equal hashes become equal ids.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import cast

import orjson
import uvloop

from benchmarks.report import COUNT, POSITIVE, command
from benchmarks.traces import BLOCK_TOKENS, TRACE_NAMES, TraceRequest, load_trace, traces_dir
from planner.options import Number

FIRST_ID, LAST_ID = 100, 999  # three digits each: a body of 4 bytes a token, and nothing special among them
CONTEXT_TOKENS = 262_144
START_S = 0.5  # between the client being ready and the trace's first instant


@dataclass(slots=True)
class Outcome:
    """One request. `sent_s` is since the trace began, and so is `due_s`, which the trace wants it to be."""

    due_s: float
    prompt_tokens: int
    sent_s: float = 0.0
    ttft_s: float | None = None  # from sending to the first event with a token; None: there was none
    cached_tokens: int = 0
    status: int = 0
    prefill: str = ""  # the worker
    error: str = ""  # what the server said instead


class BlockTexts:
    """hash id -> its token ids as they stand in a JSON array. One id is always the same tokens."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}

    def text(self, block: int, n_tokens: int = BLOCK_TOKENS) -> str:
        """`n_tokens` below the block's size: the shorter last block of a prompt."""
        text = self._texts.get(block)
        if text is None:
            ids = random.Random(block).choices(range(FIRST_ID, LAST_ID + 1), k=BLOCK_TOKENS)
            text = self._texts[block] = ",".join(map(str, ids))
        return text if n_tokens == BLOCK_TOKENS else text[: 4 * n_tokens - 1]

    def prompt(self, request: TraceRequest) -> str:
        """All token ids of `request`, separated by commas."""
        full = len(request.hashes) - 1
        last = request.prompt_tokens - full * BLOCK_TOKENS
        texts = [self.text(block) for block in request.hashes[:full]]
        return ",".join([*texts, self.text(request.hashes[full], last)])


def first_seconds(
    requests: Sequence[TraceRequest], seconds: float, output_tokens: int
) -> list[TraceRequest]:
    """Those that arrive within `seconds`, with outputs of `output_tokens` at most."""
    return [
        TraceRequest(r.arrival_s, r.prompt_tokens, min(r.output_tokens, output_tokens), r.hashes)
        for r in requests
        if r.arrival_s < seconds
    ]


class _Exchange(asyncio.Protocol):
    """One connection with one streamed request; `done` is settled when the server closes it."""

    def __init__(self, data: Sequence[bytes], outcome: Outcome) -> None:
        self._data = data
        self._outcome = outcome
        self._sent_s = 0.0
        self._received = bytearray()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._sent_s = time.monotonic()
        cast(asyncio.Transport, transport).writelines(self._data)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._outcome.ttft_s is None and b"data: {" in self._received:
            self._outcome.ttft_s = time.monotonic() - self._sent_s

    def connection_lost(self, exc: Exception | None) -> None:
        head, _, body = bytes(self._received).partition(b"\r\n\r\n")
        outcome = self._outcome
        outcome.status = int(head[9:12]) if head else 0
        for line in head.split(b"\r\n"):
            if line.lower().startswith(b"x-kvrelay-prefill:"):
                outcome.prefill = line.partition(b":")[2].strip().decode()
        if outcome.status != 200 or outcome.ttft_s is None:
            outcome.error = body[:300].decode(errors="replace")
        # The head can leave before the first token, then it cannot know; the last event always does.
        at = body.rfind(b'"cached_tokens":')
        if at >= 0:
            outcome.cached_tokens = int(body[at + 16 :].partition(b"}")[0])
        if not self.done.done():
            self.done.set_result(None)


async def send_trace(
    host: str, port: int, model: str, requests: Sequence[TraceRequest]
) -> tuple[list[Outcome], float]:
    """The outcomes in the requests' order, and the CPU seconds this process took while sending."""
    loop = asyncio.get_running_loop()
    blocks = BlockTexts()
    for request in requests:
        blocks.prompt(request)  # made before the clock runs
    outcomes = [Outcome(request.arrival_s, request.prompt_tokens) for request in requests]
    under_way: list[asyncio.Task[None]] = []

    async def send(request: TraceRequest, outcome: Outcome) -> None:
        body = (
            f'{{"model":"{model}","max_tokens":{request.output_tokens},"temperature":0,"ignore_eos":true,'
            f'"stream":true,"stream_options":{{"include_usage":true}},"prompt":[{blocks.prompt(request)}]}}'
        ).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode()
        outcome.sent_s = time.monotonic() - began_s
        _, exchange = await loop.create_connection(lambda: _Exchange((head, body), outcome), host, port)
        await exchange.done

    began_s = time.monotonic() + START_S
    cpu_s = time.process_time()
    for request, outcome in zip(requests, outcomes, strict=True):
        left_s = began_s + request.arrival_s - time.monotonic()
        if left_s > 0:
            await asyncio.sleep(left_s)
        under_way.append(asyncio.create_task(send(request, outcome)))
    await asyncio.gather(*under_way)
    return outcomes, time.process_time() - cpu_s


def main() -> None:
    parser = command("trace_client", __doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=Number(least=1, most=65535, whole=True), required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--trace", choices=TRACE_NAMES, default="conversation")
    parser.add_argument("--traces", metavar="DIR", help="where the traces are")
    parser.add_argument("--speed", type=POSITIVE, default=1.0, help="times the trace's rate")
    parser.add_argument("--seconds", type=POSITIVE, default=300.0, help="how much of it, as sent")
    parser.add_argument("--output-tokens", type=COUNT, default=8, help="longest answer")
    options = parser.parse_args()
    trace = load_trace(options.trace, traces_dir(options.traces), options.speed)
    requests = first_seconds(trace, options.seconds, options.output_tokens)
    outcomes, cpu_s = uvloop.run(send_trace(options.host, options.port, options.model, requests))
    sys.stdout.buffer.write(
        orjson.dumps({"cpu_s": cpu_s, "outcomes": [asdict(outcome) for outcome in outcomes]})
    )


if __name__ == "__main__":
    main()
