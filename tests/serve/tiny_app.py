"""A Serve application without a model: `/health`, and `/stream`, which never ends by itself."""

from __future__ import annotations

import asyncio
from typing import Any

from ray import serve

Message = dict[str, Any]


@serve.deployment(num_replicas=1, ray_actor_options={"num_cpus": 0.1}, max_ongoing_requests=100)
@serve.ingress()
class Tiny:
    def __init__(self, fail: str) -> None:
        if fail:
            raise RuntimeError(fail)

    def __serve_build_asgi_app__(self) -> Any:
        return answer  # a function: of a bound method uvicorn thinks it were ASGI 2


async def answer(scope: Message, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        while True:
            await send({"type": f"{(await receive())['type']}.complete"})
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"] == "/stream":
        for n in range(10_000):
            await send({"type": "http.response.body", "body": b"data: %d\n\n" % n, "more_body": True})
            await asyncio.sleep(0.02)
    await send({"type": "http.response.body", "body": b"ok"})


def build(args: dict[str, Any]) -> serve.Application:
    return Tiny.bind(args.get("fail", ""))
