"""One start at a time on a host and port: held from the first check until the command ends.

An abstract Unix socket, which the kernel releases however its owner ends; who listens is known by pid.
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

from serving.errors import StartError

PEER_S = 0.5
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class StartLock:
    """Taken on construction, given back by `release` (idempotent). Raises StartError if it is taken."""

    def __init__(self, host: str, port: int) -> None:
        name = f"\0kvrelay-serve-{_address(host)}-{port}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(name)
            self._socket.listen()
        except OSError:
            self._socket.close()
            raise StartError(
                f"port {port} is served by another `kvrelay serve`{_owner(name)}, running or starting; "
                "stop it, or use --port"
            ) from None

    def release(self) -> None:
        self._socket.close()


def _address(host: str) -> str:
    """`localhost` and 127.0.0.1 are one."""
    with suppress(OSError):
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    return host


def _owner(name: str) -> str:
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PEER_S)
        probe.connect(name)
        said = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return f" (pid {_CREDENTIALS.unpack(said)[0]})"
    return ""
