"""Sends requests at given times whether or not earlier ones are answered, and tells what each one met.

Reads `{"host", "port", "model", "block_tokens", "requests": [{"at_s", "blocks", "prompt_tokens",
"output_tokens"}], "into"}` from standard input and writes one JSON object into that file. A process of its
own, so that its CPU is not the server's.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import orjson
import uvloop

from benchmarks.instrument import ahead_of_the_server

FIRST_ID, LAST_ID = 100, 999  # three digits each: a body of 4 bytes a token, and nothing special among them
START_S = 0.5  # between being ready and the first request
AGAIN_PART = 0.2  # of those refused that come back once, after Retry-After


@dataclass(slots=True)
class Outcome:
    """One request; seconds since it was sent."""

    number: int
    late_s: float  # sent later than it should have been
    status: int = 0
    head_s: float | None = None  # the answer's first byte
    ttft_s: float | None = None
    last_s: float | None = None  # the last token
    retry_after_s: float | None = None
    cached_tokens: int = 0
    again: bool = False  # it had been refused before
    error: str = ""


class _Exchange(asyncio.Protocol):
    """One connection with one streamed request; `done` is settled when the server closes it."""

    def __init__(self, data: bytes, outcome: Outcome) -> None:
        self._data = data
        self._outcome = outcome
        self._received = bytearray()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._sent_s = time.monotonic()
        cast(asyncio.Transport, transport).write(self._data)

    def data_received(self, data: bytes) -> None:
        outcome, since_s = self._outcome, time.monotonic() - self._sent_s
        if outcome.head_s is None:
            outcome.head_s = since_s
        self._received += data
        if b'"text":"' in data and b'"finish_reason":null' in data:
            if outcome.ttft_s is None:
                outcome.ttft_s = since_s
            outcome.last_s = since_s

    def connection_lost(self, exc: Exception | None) -> None:
        head, _, body = bytes(self._received).partition(b"\r\n\r\n")
        outcome = self._outcome
        outcome.status = int(head[9:12]) if head else 0
        for line in head.split(b"\r\n"):
            if line.lower().startswith(b"retry-after:"):
                outcome.retry_after_s = float(line.partition(b":")[2])
        if outcome.status != 200:
            outcome.error = body[:200].decode(errors="replace")
        at = body.rfind(b'"cached_tokens":')
        if at >= 0:
            outcome.cached_tokens = int(body[at + 16 :].partition(b"}")[0])
        if not self.done.done():
            self.done.set_result(None)


def prompt_text(blocks: Sequence[int], block_tokens: int, prompt_tokens: int, texts: dict[int, str]) -> str:
    """Equal blocks are equal ids."""
    parts = []
    for i, block in enumerate(blocks):
        if block not in texts:
            ids = random.Random(block).choices(range(FIRST_ID, LAST_ID + 1), k=block_tokens)
            texts[block] = ",".join(map(str, ids))
        n_tokens = min(prompt_tokens - i * block_tokens, block_tokens)
        parts.append(texts[block][: 4 * n_tokens - 1])
    return ",".join(parts)


async def send_all(plan: dict[str, Any]) -> list[Outcome]:
    loop = asyncio.get_running_loop()
    texts: dict[int, str] = {}
    data = []
    for request in plan["requests"]:
        ids = prompt_text(request["blocks"], plan["block_tokens"], request["prompt_tokens"], texts)
        body = (
            f'{{"model":"{plan["model"]}","max_tokens":{request["output_tokens"]},"temperature":0,'
            f'"ignore_eos":true,"stream":true,"stream_options":{{"include_usage":true}},"prompt":[{ids}]}}'
        ).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode()
        data.append(head + body)
    outcomes: list[Outcome] = []
    generator = random.Random(0)

    async def send(number: int, due_s: float, again: bool) -> None:
        outcome = Outcome(number, time.monotonic() - due_s, again=again)
        outcomes.append(outcome)
        try:
            _, exchange = await loop.create_connection(
                lambda: _Exchange(data[number], outcome), plan["host"], plan["port"]
            )
        except OSError as error:
            outcome.error = str(error)
            return
        await exchange.done
        if outcome.status == 429 and not again and generator.random() < AGAIN_PART:
            await asyncio.sleep(outcome.retry_after_s or 1.0)
            await send(number, time.monotonic(), again=True)

    began_s = time.monotonic() + START_S
    under_way = []
    for number, request in enumerate(plan["requests"]):
        due_s = began_s + request["at_s"]
        left_s = due_s - time.monotonic()
        if left_s > 0:
            await asyncio.sleep(left_s)
        under_way.append(asyncio.create_task(send(number, due_s, again=False)))
    await asyncio.gather(*under_way)
    return outcomes


def main() -> None:
    plan = orjson.loads(sys.stdin.buffer.read())
    with ahead_of_the_server():
        outcomes = uvloop.run(send_all(plan))
    Path(plan["into"]).write_bytes(orjson.dumps([asdict(outcome) for outcome in outcomes]))


if __name__ == "__main__":
    main()
