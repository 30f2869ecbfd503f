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
from serving.bodies import Bodies, BodyLimits, Receive
from serving.errors import AuthenticationFailed, HeadersTooLarge, Overloaded

SWALLOW_S = 1.0
MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 << 10  # all together
NO_ROOM = "inflight"  # reason of a refusal


class Door:
    """`max_inflight`: generations at once, from when their bodies are here; `max_inflight_per_key`: of one
    tenant. `on_refused` hears the reason (a label of metrics) of what is refused for want of room, time or
    key."""

    def __init__(
        self,
        *,
        keys: ApiKeys | None = None,
        admin_key: bytes | None = None,
        max_inflight: int | None = None,
        max_inflight_per_key: int | None = None,
        bodies: BodyLimits | None = None,
        on_refused: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._keys = keys
        self._admin_key = admin_key
        self._max_inflight = max_inflight
        self._max_inflight_per_key = max_inflight_per_key
        self._bodies = Bodies(bodies or BodyLimits(), on_refused)
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

    def check_room(self, tenant: Tenant | None) -> None:
        """Before anything is read: nobody sends a body for nothing. Raises Overloaded."""
        if self._max_inflight is not None and self._inside >= self._max_inflight:
            self._on_refused(NO_ROOM)
            raise Overloaded(f"{self._max_inflight} requests are in flight; try again shortly")
        most = self._max_inflight_per_key
        if most is not None and tenant is not None and self._inside_by_tenant.get(tenant.name, 0) >= most:
            self._on_refused("key_inflight")
            raise Overloaded(f"{most} requests of this API key are in flight; try again shortly")

    @contextmanager
    def room(self, tenant: Tenant | None) -> Iterator[None]:
        """A place for one generation whose body is here. Raises Overloaded."""
        self.check_room(tenant)
        by_tenant = self._inside_by_tenant
        if tenant is not None:
            by_tenant[tenant.name] = by_tenant.get(tenant.name, 0) + 1
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            if tenant is not None:
                by_tenant[tenant.name] -= 1
                if not by_tenant[tenant.name]:
                    del by_tenant[tenant.name]

    # ------------------------------------------------------------ body

    async def swallow(self, receive: Receive) -> None:
        """Read what still comes of a body that is not wanted, for a moment, and forget it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SWALLOW_S):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        return

    def read_body(
        self, receive: Receive, announced: bytes | None, tenant: Tenant | None = None
    ) -> Awaitable[bytes]:
        """See Bodies."""
        return self._bodies.read(receive, announced, None if tenant is None else tenant.name)
