"""A block of TCP ports that one local cluster owns, so that clusters on one machine never collide.

Blocks lie between Ray's default worker ports (10002-19999, where `ray start` refuses fixed ports) and the
kernel's ephemeral ports (from 32768 on Linux). A block is claimed by binding an abstract Unix socket,
which the kernel releases however its owner ends.
"""

from __future__ import annotations

import random
import socket

from serving.errors import StartError

FIRST_PORT = 20_000
END_PORT = 32_500
BLOCK_PORTS = 500

# Offsets within a block.
_NAMED = {
    "gcs": 0,
    "node_manager": 1,
    "object_manager": 2,
    "ray_client": 3,
    "dashboard": 4,
    "dashboard_agent": 5,
    "dashboard_agent_grpc": 6,
    "runtime_env_agent": 7,
    "metrics_export": 8,
    "http": 10,
    "haproxy_stats": 11,
    "haproxy_metrics": 12,
    "fallback_http": 13,
    "fallback_grpc": 14,
}
_INGRESS_HTTP = range(20, 170)  # one a frontend replica; released ports rest for an hour (port quarantine)
_INGRESS_GRPC = range(170, 220)
_WORKERS = range(220, BLOCK_PORTS)  # one a Ray worker process


class PortBlock:
    """Claimed on construction, given back by `release` (idempotent). Raises StartError if none is free."""

    def __init__(self) -> None:
        bases = list(range(FIRST_PORT, END_PORT - BLOCK_PORTS + 1, BLOCK_PORTS))
        random.shuffle(bases)
        for base in bases:
            claim = _claim(base)
            if claim is None:
                continue
            if all(is_free(base + offset) for offset in _NAMED.values()):
                self._claim = claim
                self._base = base
                return
            claim.close()
        raise StartError(
            f"no {BLOCK_PORTS} free ports in a row between {FIRST_PORT} and {END_PORT}; "
            "too many clusters run on this machine"
        )

    def __getitem__(self, name: str) -> int:
        return self._base + _NAMED[name]

    @property
    def ingress_http(self) -> tuple[int, int]:
        return self._range(_INGRESS_HTTP)

    @property
    def ingress_grpc(self) -> tuple[int, int]:
        return self._range(_INGRESS_GRPC)

    @property
    def workers(self) -> tuple[int, int]:
        return self._range(_WORKERS)

    def release(self) -> None:
        self._claim.close()

    def _range(self, offsets: range) -> tuple[int, int]:
        """First and last port, both inclusive."""
        return self._base + offsets.start, self._base + offsets.stop - 1


def is_free(port: int, host: str = "") -> bool:
    """Whether a server could listen on `port` of `host` (default: of all interfaces) now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: a port whose old connections linger in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def _claim(base: int) -> socket.socket | None:
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0kvrelay-ports-{base}")
    except OSError:
        claim.close()
        return None
    return claim
