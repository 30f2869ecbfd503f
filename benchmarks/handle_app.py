"""What the overhead benchmark compares with: the same door and text path, tokens over a DeploymentHandle.

A worker deployment with a step loop on the same time grid; in front of it our own HTTP API, so that checks,
template, tokenizer, detokeniser and events are the same; and between them, instead of links, what Serve's
documentation shows: a streaming handle call per request, one item a token.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

from serving.api import Api
from serving.engine.base import FinishReason
from serving.errors import EngineFailure
from serving.generation import GenerationInfo, GenerationRequest, Sink
from serving.manifest import resolve_weights
from serving.served_model import load_served_model

MODEL = "sim"
FIRST_TOKEN_ID = 1000  # ids from here on are words, of the tokenizer's vocabulary


@serve.deployment(max_ongoing_requests=100_000, ray_actor_options={"num_cpus": 0.1})
class Worker:
    """One token per live stream on every multiple of `period_ms` of CLOCK_MONOTONIC."""

    def __init__(self, period_ms: float) -> None:
        self._period_s = period_ms / 1e3
        self._queues: dict[asyncio.Queue[int], int] = {}  # tokens left, by stream
        self._steps: asyncio.Task[None] | None = None
        directory = resolve_weights("smollm2-135m")
        tokenizer = load_served_model(MODEL, directory).tokenizer
        words = [i for i, raw in enumerate(tokenizer.token_bytes) if raw[:1] == b" " and raw[1:].isalpha()]
        self._words = [i for i in words if i >= FIRST_TOKEN_ID]

    async def tokens(self, count: int) -> AsyncIterator[int]:
        if self._steps is None:
            self._steps = asyncio.get_running_loop().create_task(self._run())
        queue: asyncio.Queue[int] = asyncio.Queue()
        queue.put_nowait(self._words[count % len(self._words)])  # the first one is prefill's, at once
        self._queues[queue] = count - 1
        try:
            for _ in range(count):
                yield await queue.get()
        finally:
            self._queues.pop(queue, None)

    async def _run(self) -> None:
        slot = math.ceil(time.monotonic() / self._period_s)
        while True:
            await asyncio.sleep(max(0.0, slot * self._period_s - time.monotonic()))
            slot += 1
            for queue, left in list(self._queues.items()):
                if left:
                    queue.put_nowait(self._words[left % len(self._words)])
                    self._queues[queue] = left - 1


class HandleTicket:
    def __init__(self, task: asyncio.Task[None]) -> None:
        self.info = GenerationInfo()
        self._task = task

    def cancel(self, outcome: str = "cancelled") -> None:
        self._task.cancel()


class HandleGenerator:
    """`serving.generation.Generator` over a streaming handle."""

    def __init__(self, worker: DeploymentHandle) -> None:
        self._worker = worker.options(stream=True, method_name="tokens")

    def start(self, request: GenerationRequest, sink: Sink) -> HandleTicket:
        return HandleTicket(asyncio.get_running_loop().create_task(self._stream(request, sink)))

    async def _stream(self, request: GenerationRequest, sink: Sink) -> None:
        try:
            async for token in self._worker.remote(request.params.max_tokens):
                sink.on_tokens([token], None)
        except Exception as error:
            sink.on_error(EngineFailure(str(error)))
        else:
            sink.on_finish(FinishReason.LENGTH)


@serve.deployment(max_ongoing_requests=100_000, ray_actor_options={"num_cpus": 0.1})
@serve.ingress()
class Ingress:
    def __init__(self, worker: DeploymentHandle) -> None:
        self._api = Api(
            {MODEL: load_served_model(MODEL, resolve_weights("smollm2-135m"))},
            HandleGenerator(worker),
            health=lambda: (200, {"status": "ok"}),
            metrics=no_metrics,
            on_end=lambda record: None,
        )

    def __serve_build_asgi_app__(self) -> Callable[..., Awaitable[None]]:
        return self._api


async def no_metrics() -> bytes:
    return b""


def build(args: dict[str, Any]) -> Application:
    worker = Worker.bind(float(args["period_ms"]))  # type: ignore[attr-defined]
    application: Application = Ingress.bind(worker)  # type: ignore[attr-defined]
    return application
