"""The HTTP API as a raw ASGI application: routes, bodies, ids and errors; what is said is in sse.py.

A generation's path: read the body, take a place, check it (openai), render and tokenise (intake), start it
on the Generator with a response as its sink (responder), then wait for its end or for the client to leave.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson

from serving.access_log import AccessRecord, log_access
from serving.admin_api import Ask, is_admin_path, route
from serving.api_keys import Tenant
from serving.bodies import ClientGone, Receive
from serving.collected_response import CollectedResponse
from serving.door import Door
from serving.eager import Send
from serving.errors import (
    AuthenticationFailed,
    BodyTimeout,
    BodyTooLarge,
    InvalidRequest,
    KVRelayError,
    MethodNotAllowed,
    ModelNotFound,
    NotFound,
    Overcrowded,
    error_body,
)
from serving.generation import Generator
from serving.intake import Intake, RequestHead
from serving.openai import parse_chat, parse_completion
from serving.responder import Headers, Response, internal_error, public_error
from serving.served_model import ServedModel
from serving.sse import Endpoint, Envelope, Variants, model_body, models_body
from serving.streamed_response import StreamedResponse

_log = logging.getLogger("kvrelay.api")

Scope = Mapping[str, Any]
Health = Callable[[], tuple[int, dict[str, Any]]]  # status and body of /health
Metrics = Callable[[], Awaitable[bytes]]  # Prometheus text of /metrics

_ID = re.compile(r"^[A-Za-z0-9._:-]{1,128}$")
_MAX_TIMEOUT_MS = 86_400_000
_MAX_SHOWN_NAME = 128  # characters of an unknown model's name in the error
_MODELS = "/v1/models"
_PREFIX = {Endpoint.CHAT: "chatcmpl-", Endpoint.COMPLETION: "cmpl-"}
_ENDPOINTS = {endpoint.value: endpoint for endpoint in Endpoint}


class Api:
    """`models` and `generator` may be filled while it serves; `models` is looked up by name per request."""

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        generator: Generator,
        *,
        health: Health,
        metrics: Metrics,
        door: Door | None = None,
        keep_alive_s: float = 10.0,
        on_end: Callable[[AccessRecord], None] = log_access,
        debug: Mapping[str, Callable[[], object]] | None = None,
        admin: Ask | None = None,
        id_is_echoed: bool = False,
        variants: Variants | None = None,
    ) -> None:
        """`keep_alive_s`: a stream that is quiet this long gets a comment; `on_end`: once a generation.

        `debug`: path -> what its GET shows as JSON, to whoever has the admin key; without a key no such
        path; likewise `admin`, which answers the operator's routes. `id_is_echoed`: the server gives every
        request an `x-request-id` and repeats it in the answer.
        """
        self._models = models
        self._generator = generator
        self._health = health
        self._metrics = metrics
        self._door = door or Door()
        self._keep_alive_s = keep_alive_s
        self._on_end = on_end
        self._debug = debug or {}
        self._admin = admin
        self._id_is_echoed = id_is_echoed
        self._variants = variants
        self._intake = Intake()
        self.in_flight = 0  # HTTP requests that are not answered to their end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            self.in_flight += 1
            try:
                await _Exchange(self, scope, receive, send).run()
            finally:
                self.in_flight -= 1
        else:
            raise RuntimeError(f"unsupported ASGI scope {scope['type']!r}")

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await send({"type": "lifespan.startup.complete"})
            elif message["type"] == "lifespan.shutdown":
                self._intake.close()
                await send({"type": "lifespan.shutdown.complete"})
                return


class _Exchange:
    """One HTTP request and its answer."""

    def __init__(self, api: Api, scope: Scope, receive: Receive, send: Send) -> None:
        self._api = api
        self._receive = receive
        self._send = send
        self._response: Response | None = None
        self._method: str = scope["method"]
        root: str = scope.get("root_path", "")
        path: str = scope["path"]
        self._path = path[len(root) :] if root and path.startswith(root + "/") else path
        self._raw_headers: list[tuple[bytes, bytes]] = list(scope["headers"])
        self._headers: dict[bytes, bytes] = dict(self._raw_headers)
        given = self._header(b"x-request-id")
        self.request_id = given if given and _ID.match(given) else uuid.uuid4().hex
        self._says_id = not (api._id_is_echoed and given == self.request_id)

    async def run(self) -> None:
        try:
            await self._route()
        except ClientGone:
            return
        except KVRelayError as error:
            await self._answer_error(public_error(error, self.request_id))
        except Exception:
            _log.exception("request %s: internal error", self.request_id)
            await self._answer_error(internal_error())

    async def _route(self) -> None:
        path, door = self._path, self._api._door
        door.check_head(self._raw_headers)
        authorization = self._headers.get(b"authorization")
        tenant = door.tenant(authorization) if path.startswith("/v1/") else None
        endpoint = _ENDPOINTS.get(path)
        if endpoint is not None:
            self._allow("POST")
            door.check_room(tenant)
            await self._generate(endpoint, tenant)
        elif path == _MODELS:
            self._allow("GET", "HEAD")
            await self._answer(200, models_body(list(self._api._models.values()), self._api._variants))
        elif path.startswith(_MODELS + "/"):
            self._allow("GET", "HEAD")
            await self._answer(200, model_body(self._model(path[len(_MODELS) + 1 :]), self._api._variants))
        elif path == "/health":
            self._allow("GET", "HEAD")
            status, body = self._api._health()
            again = [(b"retry-after", b"1")] if status == 503 else []
            await self._answer(status, orjson.dumps(body), b"application/json", *again)
        elif path == "/metrics":
            self._allow("GET", "HEAD")
            door.check_reader(authorization)
            await self._answer(200, await self._api._metrics(), b"text/plain; version=0.0.4; charset=utf-8")
        elif path in self._api._debug and door.has_admin:
            self._allow("GET", "HEAD")
            door.check_admin(authorization)
            await self._answer(200, orjson.dumps(self._api._debug[path]()))
        elif is_admin_path(path) and self._api._admin is not None and door.has_admin:
            door.check_admin(authorization)
            data = await door.read_body(self._receive, self._headers.get(b"content-length"))
            status, told = await self._api._admin(*route(self._method, path, data))
            await self._answer(status, orjson.dumps(told))
        else:
            raise NotFound("there is nothing at this path")

    async def _generate(self, endpoint: Endpoint, tenant: Tenant | None) -> None:
        record = AccessRecord(self.request_id, endpoint.value, started_at=asyncio.get_running_loop().time())
        record.tenant = tenant.name if tenant is not None else None
        status = KVRelayError.status
        door = self._api._door
        try:
            head = RequestHead(self.request_id, self._session(), self._timeout_ms(), tenant)
            data = await door.read_body(self._receive, self._headers.get(b"content-length"), tenant)
            with door.room(tenant):
                response = await self._start(endpoint, record, head, data)
                record.client_left = not await self._until_ended(response)
                if response.error is not None and not response.answered:
                    raise response.error
                status = 200
                if isinstance(response, CollectedResponse) and not record.client_left:
                    await self._answer(200, response.body, b"application/json", *response.placement)
        except KVRelayError as error:
            status = error.status
            record.error = error.code or error.type
            raise
        except ClientGone:
            record.client_left = True
            raise
        finally:
            if self._response is not None:
                self._response.abandon()
                record.take(self._response)
            record.ended(status)
            self._api._on_end(record)

    async def _start(
        self, endpoint: Endpoint, record: AccessRecord, head: RequestHead, data: bytes
    ) -> Response:
        body = parse_chat(data) if endpoint is Endpoint.CHAT else parse_completion(data)
        model = self._model(body.model)
        record.model = model.name
        record.stream = bool(body.stream)
        intake = self._api._intake
        if endpoint is Endpoint.CHAT:
            pieces = await intake.chat(body, model, head)  # type: ignore[arg-type]
        else:
            pieces = await intake.completion(body, model, head)  # type: ignore[arg-type]
        envelope = Envelope(endpoint, _PREFIX[endpoint] + uuid.uuid4().hex, int(time.time()), model.name)
        response: Response
        if body.stream:
            response = self._response = StreamedResponse(
                envelope,
                pieces,
                model.vocabulary,
                send=self._send,
                headers=self._head(b"text/event-stream; charset=utf-8", (b"cache-control", b"no-cache")),
                include_usage=body.include_usage,
                keep_alive_s=self._api._keep_alive_s,
            )
        else:
            response = self._response = CollectedResponse(envelope, pieces, model.vocabulary)
        response.begin(self._api._generator)
        return response

    async def _until_ended(self, response: Response) -> bool:
        """Wait for the response's end or the client's; false when the client left first."""
        leaving = asyncio.ensure_future(self._client_leaves())
        try:
            await asyncio.wait((response.done, leaving), return_when=asyncio.FIRST_COMPLETED)
            return response.done.done()
        finally:
            leaving.cancel()

    async def _client_leaves(self) -> None:
        try:
            while (await self._receive())["type"] != "http.disconnect":
                pass
        except Exception:  # the server's other way to say it
            _log.debug("request %s: receive failed", self.request_id, exc_info=True)

    def _allow(self, *methods: str) -> None:
        if self._method not in methods:
            raise MethodNotAllowed(f"this path answers {' and '.join(methods)} only")

    def _model(self, name: str) -> ServedModel:
        model = self._api._models.get(name)
        if model is None:
            shown = name if len(name) <= _MAX_SHOWN_NAME else name[:_MAX_SHOWN_NAME] + "..."
            raise ModelNotFound(f"the model {shown!r} does not exist", param="model")
        return model

    def _header(self, name: bytes) -> str | None:
        value = self._headers.get(name)
        return None if value is None else value.decode("latin-1")

    def _session(self) -> str | None:
        value = self._header(b"x-session-id")
        if value is not None and not _ID.match(value):
            raise InvalidRequest(
                "x-session-id must be 1 to 128 letters, digits or ._:-", param="x-session-id"
            )
        return value

    def _timeout_ms(self) -> float | None:
        value = self._header(b"x-request-timeout-ms")
        if value is None:
            return None
        try:
            timeout_ms = float(value)
        except ValueError:
            timeout_ms = math.nan
        if not 0 < timeout_ms <= _MAX_TIMEOUT_MS:
            raise InvalidRequest(
                f"x-request-timeout-ms must be a number above 0, at most {_MAX_TIMEOUT_MS}",
                param="x-request-timeout-ms",
            )
        return timeout_ms

    def _head(self, content_type: bytes, *more: tuple[bytes, bytes]) -> Headers:
        head = [(b"content-type", content_type), *more]
        if self._says_id:
            head.append((b"x-request-id", self.request_id.encode()))
        return head

    async def _answer(
        self,
        status: int,
        body: bytes,
        content_type: bytes = b"application/json",
        *more: tuple[bytes, bytes],
    ) -> None:
        head = self._head(content_type, (b"content-length", str(len(body)).encode()), *more)
        await self._send({"type": "http.response.start", "status": status, "headers": head})
        if (b"connection", b"close") in more:
            # Closing on unread bytes resets the connection, and the answer may be lost with it.
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
            await self._api._door.swallow(self._receive)
            body = b""
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _answer_error(self, error: KVRelayError) -> None:
        if self._response is not None and self._response.answered:
            return  # the stream has said what there is to say
        more = []
        if error.retry_after_s is not None:
            more.append((b"retry-after", str(error.retry_after_s).encode()))
        if isinstance(error, AuthenticationFailed):
            more.append((b"www-authenticate", b'Bearer realm="kvrelay"'))
        if isinstance(error, BodyTimeout | BodyTooLarge | Overcrowded):
            # What still comes of the body is not worth reading.
            more.append((b"connection", b"close"))
        if isinstance(error, MethodNotAllowed):
            more.append((b"allow", b"POST" if self._path in _ENDPOINTS else b"GET, HEAD"))
        await self._answer(error.status, orjson.dumps(error_body(error)), b"application/json", *more)
