"""Who may ask: the keys in `security.api_keys_file`, and the tenant that each of them stands for.

One key a line, bare or as `name:key`; blank lines and lines that begin with # are skipped. Keys of one
name are one tenant, so that a key can be replaced: add the new one below, later take the old one out. The
file is looked at again at most once a second; one that cannot be used any more changes nothing and is
logged.
"""

from __future__ import annotations

import hmac
import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from time import monotonic

from serving.errors import AuthenticationFailed, ConfigError

log = logging.getLogger("kvrelay.api")

LOOK_S = 1.0
MIN_KEY_CHARS = 16
MAX_KEY_CHARS = 512
MAX_KEYS = 10_000
MAX_FILE_BYTES = 4 << 20
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEY = re.compile(rf"[!-9;-~]{{{MIN_KEY_CHARS},{MAX_KEY_CHARS}}}")  # printable, no space, no colon


@dataclass(frozen=True, slots=True)
class Tenant:
    """`salt`: of the prefix cache, unless a request brings its own; it cannot be guessed from the name."""

    name: str
    salt: str


class ApiKeys:
    """The keys of one file, as it is now. Raises ConfigError when it cannot be used to begin with."""

    def __init__(self, path: str, clock: Callable[[], float] = monotonic) -> None:
        self._path = Path(path)
        self._clock = clock
        self._looked_s = clock()
        self._seen: object = None
        try:
            self._seen = self._look()
            self._keys = parse_keys(self._path.read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(f"security.api_keys_file = {path!r}: {_text(error)}") from None

    def tenant(self, authorization: bytes | None) -> Tenant:
        """Whose key the value of an Authorization header bears. Raises AuthenticationFailed.

        All keys are compared, as hashes and each in constant time: how long it takes tells nothing.
        """
        self._refresh()
        scheme, _, key = (authorization or b"").partition(b" ")
        digest = sha256(key.strip()).digest()
        found: Tenant | None = None
        for known, tenant in self._keys:
            if hmac.compare_digest(known, digest):
                found = tenant
        if found is None or scheme.lower() != b"bearer":
            raise AuthenticationFailed("a valid API key is needed: `Authorization: Bearer <key>`")
        return found

    def _refresh(self) -> None:
        now_s = self._clock()
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        seen: object = None
        try:
            seen = self._look()
            if seen != self._seen:
                self._keys = parse_keys(self._path.read_bytes())
                log.info("security.api_keys_file: %d keys now", len(self._keys))
        except (OSError, ValueError) as error:
            if seen != self._seen:  # once a change
                log.error("security.api_keys_file: %s; the keys stay as they were", _text(error))
        self._seen = seen

    def _look(self) -> object:
        """What is different after every edit."""
        stat = os.stat(self._path)
        if stat.st_size > MAX_FILE_BYTES:
            raise ValueError(f"{stat.st_size} bytes; allowed: up to {MAX_FILE_BYTES}")
        return stat.st_mtime_ns, stat.st_size, stat.st_ino


def parse_keys(data: bytes) -> list[tuple[bytes, Tenant]]:
    """(SHA-256 of the key, its tenant) of every line. Raises ValueError, which never shows a key."""
    tenants: dict[str, Tenant] = {}
    keys: dict[bytes, Tenant] = {}
    for number, raw in enumerate(data.decode("ascii", "replace").splitlines(), start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        name, colon, key = line.rpartition(":")
        if not _KEY.fullmatch(key):
            raise ValueError(
                f"line {number}: a key has {MIN_KEY_CHARS} to {MAX_KEY_CHARS} printable ASCII characters "
                "without space or colon"
            )
        digest = sha256(key.encode()).digest()
        if not colon:
            name = f"key-{digest.hex()[:12]}"
        elif not _NAME.fullmatch(name):
            raise ValueError(f"line {number}: a name has 1 to 64 letters, digits or ._-")
        if digest in keys:
            raise ValueError(f"line {number}: this key stands there twice")
        if name not in tenants:
            tenants[name] = Tenant(name, sha256(b"kvrelay cache salt " + key.encode()).hexdigest())
        keys[digest] = tenants[name]
    if not keys:
        raise ValueError("there is no key in it")
    if len(keys) > MAX_KEYS:
        raise ValueError(f"{len(keys)} keys; allowed: up to {MAX_KEYS}")
    return list(keys.items())


def _text(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
