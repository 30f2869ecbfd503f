"""What a request must pass before anything of it is used: its head, its key, room for it, its body in time.

Limits are per frontend. Everything here answers with an error of the tree; what it costs a client to be
refused is less than what it costs us.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from serving.api_keys import ApiKeys, Tenant
from serving.eager import Message
from serving.errors import AuthenticationFailed, BodyTimeout, BodyTooLarge, HeadersTooLarge, Overloaded

SWALLOW_S = 1.0
MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 << 10  # all together
NO_ROOM = "inflight"  # reason of a refusal

Receive = Callable[[], Awaitable[Message]]


class ClientGone(Exception):
    """The client left before its request was read."""


class Door:
    """`max_inflight`: generations at once, from before their bodies are read; `max_inflight_per_key`: of
    one tenant. `on_refused` hears the reason (a label of metrics) of what is refused for want of room, time
    or key."""

    def __init__(
        self,
        *,
        keys: ApiKeys | None = None,
        admin_key: bytes | None = None,
        max_inflight: int | None = None,
        max_inflight_per_key: int | None = None,
        body_limit_bytes: int = 16 << 20,
        body_s: float = 30.0,
        on_refused: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._keys = keys
        self._admin_key = admin_key
        self._max_inflight = max_inflight
        self._max_inflight_per_key = max_inflight_per_key
        self._body_limit = body_limit_bytes
        self._body_s = body_s
        self._on_refused = on_refused
        self._inside = 0
        self._inside_by_tenant: dict[str, int] = {}

    def check_head(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Raises HeadersTooLarge."""
        if len(headers) > MAX_HEADERS:
            raise HeadersTooLarge(f"more than {MAX_HEADERS} headers")
        if sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES:
            raise HeadersTooLarge(f"more than {MAX_HEADER_BYTES} bytes of headers")

    # ------------------------------------------------------------ keys

    @property
    def has_admin(self) -> bool:
        return self._admin_key is not None

    def tenant(self, authorization: bytes | None) -> Tenant | None:
        """Who asks; None where no keys are configured. Raises AuthenticationFailed."""
        if self._keys is None:
            return None
        try:
            return self._keys.tenant(authorization)
        except AuthenticationFailed:
            self._on_refused("unauthorized")
            raise

    def check_reader(self, authorization: bytes | None) -> None:
        """Of /metrics: any API key or the admin key, where API keys are configured.
        Raises AuthenticationFailed."""
        if not self._is_admin(authorization):
            self.tenant(authorization)

    def check_admin(self, authorization: bytes | None) -> None:
        """Raises AuthenticationFailed."""
        if not self._is_admin(authorization):
            raise AuthenticationFailed("this path wants the admin key as a bearer token")

    def _is_admin(self, authorization: bytes | None) -> bool:
        key = self._admin_key
        return key is not None and hmac.compare_digest(authorization or b"", b"Bearer " + key)

    # ------------------------------------------------------------ room

    @contextmanager
    def room(self, tenant: Tenant | None) -> Iterator[None]:
        """A place for one generation. Raises Overloaded."""
        if self._max_inflight is not None and self._inside >= self._max_inflight:
            self._on_refused(NO_ROOM)
            raise Overloaded(f"{self._max_inflight} requests are in flight; try again shortly")
        name = None if tenant is None else tenant.name
        by_tenant = self._inside_by_tenant
        if name is not None:
            most = self._max_inflight_per_key
            if most is not None and by_tenant.get(name, 0) >= most:
                self._on_refused("key_inflight")
                raise Overloaded(f"{most} requests of this API key are in flight; try again shortly")
            by_tenant[name] = by_tenant.get(name, 0) + 1
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            if name is not None:
                by_tenant[name] -= 1
                if not by_tenant[name]:
                    del by_tenant[name]

    # ------------------------------------------------------------ body

    async def swallow(self, receive: Receive) -> None:
        """Read what still comes of a body that is not wanted, for a moment, and forget it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SWALLOW_S):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        return

    async def read_body(self, receive: Receive, announced: bytes | None) -> bytes:
        """`announced`: the value of Content-Length. Raises BodyTooLarge as soon as that is known,
        BodyTimeout, ClientGone."""
        limit = self._body_limit
        too_large = BodyTooLarge(f"the body is larger than {limit} bytes")
        if announced is not None and announced.isdigit() and int(announced[:20]) > limit:
            raise too_large
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._body_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    part: bytes = message.get("body", b"")
                    size += len(part)
                    if size > limit:
                        raise too_large
                    parts.append(part)
                    if not message.get("more_body", False):
                        return parts[0] if len(parts) == 1 else b"".join(parts)
        except TimeoutError:
            self._on_refused("body_timeout")
            raise BodyTimeout(f"the body was not here within {self._body_s:g} s") from None
