"""What the overhead benchmark compares with: the same paced tokens over a plain DeploymentHandle stream.

A worker deployment with a step loop on the same time grid, a raw ASGI ingress in front of it, and between
them a streaming handle call per request, one item a token: how Serve's documentation does it.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

EVENT = (
    b'data: {"id":"chatcmpl-0","object":"chat.completion.chunk","created":0,"model":"handle","choices":'
    b'[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null}]}\n\n'
)


@serve.deployment(max_ongoing_requests=100_000, ray_actor_options={"num_cpus": 0.1})
class Worker:
    """One token per live stream on every multiple of `period_ms` of CLOCK_MONOTONIC."""

    def __init__(self, period_ms: float) -> None:
        self._period_s = period_ms / 1e3
        self._queues: dict[asyncio.Queue[bytes], int] = {}
        self._loop_task: asyncio.Task[None] | None = None

    async def tokens(self, count: int) -> AsyncIterator[bytes]:
        if self._loop_task is None:
            self._loop_task = asyncio.get_running_loop().create_task(self._steps())
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        queue.put_nowait(EVENT)  # the first token is prefill's, at once
        self._queues[queue] = count - 1
        try:
            for _ in range(count):
                yield await queue.get()
        finally:
            self._queues.pop(queue, None)

    async def _steps(self) -> None:
        slot = math.ceil(time.monotonic() / self._period_s)
        while True:
            await asyncio.sleep(max(0.0, slot * self._period_s - time.monotonic()))
            slot += 1
            for queue, left in list(self._queues.items()):
                if left:
                    queue.put_nowait(EVENT)
                    self._queues[queue] = left - 1


@serve.deployment(max_ongoing_requests=100_000, ray_actor_options={"num_cpus": 0.1})
@serve.ingress()
class Ingress:
    def __init__(self, worker: DeploymentHandle) -> None:
        self._worker = worker.options(stream=True, method_name="tokens")

    def __serve_build_asgi_app__(self) -> Callable[..., Awaitable[None]]:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "lifespan":
                await lifespan(receive, send)
            elif scope["method"] != "POST":
                await answer(send, b"ok")
            else:
                body = json.loads((await receive())["body"])
                headers = [(b"content-type", b"text/event-stream")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                async for event in self._worker.remote(int(body["max_tokens"])):
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

        return app


async def lifespan(receive: Any, send: Any) -> None:
    while True:
        message = await receive()
        await send({"type": message["type"] + ".complete"})
        if message["type"] == "lifespan.shutdown":
            return


async def answer(send: Any, body: bytes) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


def build(args: dict[str, Any]) -> Application:
    application: Application = Ingress.bind(Worker.bind(float(args["period_ms"])))  # type: ignore[attr-defined]
    return application
