"""What one streamed token costs the frontend from the sink to ASGI `send`, with a `send` that does nothing.

    python -m benchmarks.stream_cost [--json]

A token a push, the worst case: nothing is batched. The server's own write is not in it.
"""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from collections.abc import Sequence
from typing import Any

from benchmarks.report import command
from serving.detokenize import Detokenizer
from serving.engine.base import SamplingParams, TokenLogprobs
from serving.generation import GenerationInfo, GenerationRequest, Sink
from serving.responder import Piece
from serving.sse import Endpoint, Envelope
from serving.streamed_response import StreamedResponse
from tests.tiny_tokenizer import ids, tiny_vocabulary

TOKENS = 20_000
ROUNDS = 5


class _Ticket:
    info = GenerationInfo()

    def cancel(self, outcome: str = "cancelled") -> None: ...


class _Held:
    """A generator that keeps the sink, for the benchmark to feed."""

    sink: Sink

    def start(self, request: GenerationRequest, sink: Sink) -> _Ticket:
        self.sink = sink
        return _Ticket()


async def _nothing(message: Any) -> None: ...


def _detokenize_us(stop: Sequence[str]) -> float:
    tokens = ids("The quick brown fox jumps over the lazy dog. ") * 2000
    best = float("inf")
    for _ in range(ROUNDS):
        push = Detokenizer(tiny_vocabulary(), stop).push
        pushes = [[token] for token in tokens[:TOKENS]]
        start = time.perf_counter()
        for one in pushes:
            push(one)
        best = min(best, (time.perf_counter() - start) / len(pushes))
    return best * 1e6


async def _stream_us(endpoint: Endpoint, stop: list[str], logprobs: int | None) -> float:
    tokens = (ids("The quick brown fox jumps over the lazy dog. ") * 2000)[:TOKENS]
    params = SamplingParams(max_tokens=TOKENS, seed=1, logprobs=logprobs)
    best = float("inf")
    for _ in range(ROUNDS):
        request = GenerationRequest("r", "m", array("I", [1]), params)
        held = _Held()
        response = StreamedResponse(
            Envelope(endpoint, "chatcmpl-0123456789abcdef0123456789abcdef", 1_700_000_000, "smollm2-135m"),
            [Piece(1, request, "", stop)],
            tiny_vocabulary(),
            send=_nothing,
            headers=[],
            include_usage=True,
            keep_alive_s=10,
        )
        response.begin(held)
        pushes = [[token] for token in tokens]
        rows = [[TokenLogprobs(t, -1.0, [(5, -1.0)] * logprobs)] for t in tokens] if logprobs else None
        on_tokens = held.sink.on_tokens
        start = time.perf_counter()
        for i, one in enumerate(pushes):
            on_tokens(one, rows[i] if rows else None)
        best = min(best, (time.perf_counter() - start) / len(pushes))
        response.abandon()
    return best * 1e6


def measure() -> dict[str, float]:
    """Microseconds a token, best of ROUNDS."""
    return {
        "detokenise": _detokenize_us(()),
        "detokenise_4_stops": _detokenize_us(("END", "###", "\n\n\n", "zzz")),
        "stream_chat": asyncio.run(_stream_us(Endpoint.CHAT, [], None)),
        "stream_completion": asyncio.run(_stream_us(Endpoint.COMPLETION, [], None)),
        "stream_chat_4_stops": asyncio.run(
            _stream_us(Endpoint.CHAT, ["END", "###", "\n\n\n", "zzz"], None)
        ),
        "stream_chat_logprobs_5": asyncio.run(_stream_us(Endpoint.CHAT, [], 5)),
    }


def main() -> None:
    parser = command("stream_cost", __doc__)
    parser.add_argument("--json", action="store_true", help="print one object, microseconds a token")
    found = measure()
    if parser.parse_args().json:
        print(json.dumps(found))
        return
    for name, us in found.items():
        print(f"{name:24} {us:6.2f} us/token")


if __name__ == "__main__":
    main()
