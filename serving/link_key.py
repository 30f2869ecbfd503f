"""The secret that authenticates links: from a file, the environment, or created once per application.

A created key lives in the cluster's own store, so every later deploy finds the same one and old and new
replicas understand each other. It never stands in arguments or logs.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from serving.config import LinkConfig
from serving.errors import ConfigError

ENV_NAME = "KVRELAY_LINK_KEY"
KEY_BYTES = 32
MIN_KEY_BYTES = 16
_NAMESPACE = b"kvrelay"


def link_key(config: LinkConfig, application: str) -> bytes:
    """The key of `application`; must run in a process that is connected to Ray.

    Raises ConfigError if a configured key is missing or shorter than 16 bytes.
    """
    if config.key_file is not None:
        return read_key(config.key_file, "link.key_file")
    if ENV_NAME in os.environ:
        return _checked(os.environ[ENV_NAME].encode(), ENV_NAME)
    return _cluster_key(application)


def read_key(path: str, setting: str) -> bytes:
    """The key in the file that `setting` names. Raises ConfigError if it is missing or too short."""
    try:
        return _checked(Path(path).read_bytes().strip(), f"{setting} {path}")
    except OSError as error:
        raise ConfigError(f"{setting} = {path!r}: {error.strerror}") from None


def _checked(key: bytes, source: str) -> bytes:
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(f"{source} has {len(key)} bytes; allowed: at least {MIN_KEY_BYTES}")
    return key


def _cluster_key(application: str) -> bytes:
    from ray.experimental import internal_kv

    name = f"link-key:{application}".encode()
    fresh = secrets.token_hex(KEY_BYTES).encode()
    internal_kv._internal_kv_put(name, fresh, overwrite=False, namespace=_NAMESPACE)
    key = internal_kv._internal_kv_get(name, namespace=_NAMESPACE)
    if key is None:
        raise ConfigError("the cluster's store did not keep the link key; set link.key_file")
    return bytes(key)
