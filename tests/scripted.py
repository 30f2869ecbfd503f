"""A generator that answers from a script, and an ASGI client that records what an application sends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from serving.api import Api
from serving.engine.base import FinishReason, TokenLogprobs
from serving.errors import KVRelayError
from serving.generation import GenerationInfo, GenerationRequest, Sink
from serving.served_model import ServedModel
from tests.tiny_tokenizer import ids, tiny_model


@dataclass
class ScriptedTicket:
    info: GenerationInfo
    cancelled: bool = False

    def cancel(self, outcome: str = "cancelled") -> None:
        self.cancelled = True


@dataclass
class ScriptedGenerator:
    """Each request gets the tokens of `answer`, `per_step` a loop turn, then a finish or `error`.

    `synchronous`: everything happens inside `start`, before the ticket is known.
    """

    answer: Callable[[GenerationRequest], Sequence[int]] = lambda request: ids("Hello, world!")
    per_step: int = 1
    error: KVRelayError | None = None  # instead of the finish
    refuse: KVRelayError | None = None  # instead of starting
    hang: bool = False  # no finish at all
    synchronous: bool = False
    cached_tokens: int = 0
    requests: list[GenerationRequest] = field(default_factory=list)
    tickets: list[ScriptedTicket] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)  # tokens delivered, all requests together

    def start(self, request: GenerationRequest, sink: Sink) -> ScriptedTicket:
        if self.refuse is not None:
            raise self.refuse
        ticket = ScriptedTicket(GenerationInfo(self.cached_tokens, "prefill-1", "decode-1"))
        self.requests.append(request)
        self.tickets.append(ticket)
        answer = list(self.answer(request))
        tokens = answer[: request.params.max_tokens]
        reason = FinishReason.LENGTH if len(answer) >= request.params.max_tokens else FinishReason.STOP
        if self.synchronous:
            while self._step(tokens, reason, request, sink, ticket):
                pass
        else:
            asyncio.get_running_loop().call_soon(self._run, tokens, reason, request, sink, ticket)
        return ticket

    def _run(self, *state: Any) -> None:
        if self._step(*state):
            asyncio.get_running_loop().call_soon(self._run, *state)

    def _step(
        self,
        tokens: list[int],
        reason: FinishReason,
        request: GenerationRequest,
        sink: Sink,
        ticket: ScriptedTicket,
    ) -> bool:
        """Whether there is more to do."""
        if ticket.cancelled:
            return False
        if tokens:
            step, tokens[:] = tokens[: self.per_step], tokens[self.per_step :]
            self.sent += step
            wanted = request.params.logprobs
            logprobs = None
            if wanted is not None:
                top = [(token, -0.5 - token) for token in range(2, 2 + wanted)]
                logprobs = [TokenLogprobs(token, -0.25, top) for token in step]
            sink.on_tokens(step, logprobs)
            return True
        if self.error is not None:
            sink.on_error(self.error)
        elif not self.hang:
            sink.on_finish(reason)
        return False


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes
    complete: bool  # the last body part came

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of every event; `[DONE]` stays a string, comments are left out."""
        found = []
        for event in self.body.decode().split("\n\n"):
            if event.startswith("data: "):
                data = event.removeprefix("data: ")
                found.append(data if data == "[DONE]" else json.loads(data))
        return found

    @property
    def chunks(self) -> list[Any]:
        """The events that are chunks; the stream must have ended with `[DONE]`."""
        events = self.events
        assert events[-1] == "[DONE]", events
        assert events.count("[DONE]") == 1
        return events[:-1]

    def text(self, index: int = 0) -> str:
        """The streamed text of one choice."""
        choices = [c for chunk in self.chunks for c in chunk["choices"] if c["index"] == index]
        return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)

    def reasons(self, index: int = 0) -> list[str]:
        choices = [c for chunk in self.chunks for c in chunk["choices"] if c["index"] == index]
        return [c["finish_reason"] for c in choices if c["finish_reason"] is not None]


class Client:
    """Calls an ASGI application as a server would."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.leave = asyncio.Event()  # set it to disconnect
        self.leave_after = b""  # disconnect once this was received three times
        self.patience_s = 10.0

    async def send(
        self,
        method: str,
        path: str,
        body: bytes | dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        *,
        parts: int = 1,
    ) -> Reply:
        """`parts`: how many pieces the body arrives in."""
        data = json.dumps(body).encode() if isinstance(body, dict) else body or b""
        size = max(1, -(-len(data) // parts))
        pieces = [data[i : i + size] for i in range(0, len(data), size)] or [b""]
        messages: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            if pieces:
                piece = pieces.pop(0)
                return {"type": "http.request", "body": piece, "more_body": bool(pieces)}
            await self.leave.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            messages.append(dict(message))
            bodies = b"".join(m.get("body", b"") for m in messages)
            if self.leave_after and bodies.count(self.leave_after) >= 3:
                self.leave.set()

        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": [(k.lower().encode(), v.encode()) for k, v in (headers or {}).items()],
        }
        async with asyncio.timeout(self.patience_s):
            await self.api(scope, receive, send)
        bodies = [m for m in messages if m["type"] == "http.response.body"]
        start: dict[str, Any] = messages[0] if messages else {"status": 0, "headers": []}
        return Reply(
            start["status"],
            {k.decode(): v.decode() for k, v in start["headers"]},
            b"".join(m["body"] for m in bodies),
            complete=bool(bodies) and not bodies[-1]["more_body"],
        )

    async def chat(self, **fields: Any) -> Reply:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], **fields}
        return await self.send("POST", "/v1/chat/completions", body)

    async def complete(self, **fields: Any) -> Reply:
        return await self.send("POST", "/v1/completions", {"model": "tiny", "prompt": "one two", **fields})


async def no_metrics() -> bytes:
    return b"# metrics\n"


def make_client(
    generator: ScriptedGenerator | None = None, models: Sequence[ServedModel] = (), **settings: Any
) -> Client:
    served = {model.name: model for model in models or (tiny_model(),)}
    api = Api(
        served,
        generator or ScriptedGenerator(),
        health=lambda: (200, {"status": "ok"}),
        metrics=no_metrics,
        **settings,
    )
    return Client(api)
