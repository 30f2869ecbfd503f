"""The keys of a Serve file around our own settings. Serve passes over one that it does not know, without a
word: a wrong `http_option:` would serve on every interface."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from serving.errors import ConfigError

PROXY_LOCATIONS = ("Disabled", "HeadOnly", "EveryNode")
# By section, as in Serve's own schema (tests/serve/test_serve_keys.py compares).
KEYS = {
    "": (
        "proxy_location",
        "http_options",
        "grpc_options",
        "controller_options",
        "logging_config",
        "tracing_config",
        "applications",
        "target_capacity",
    ),
    "http_options": (
        "host",
        "port",
        "root_path",
        "request_timeout_s",
        "keep_alive_timeout_s",
        "ssl_keyfile",
        "ssl_certfile",
        "ssl_keyfile_password",
        "ssl_ca_certs",
    ),
    "applications": (
        "name",
        "route_prefix",
        "import_path",
        "runtime_env",
        "host",
        "port",
        "deployments",
        "autoscaling_policy",
        "args",
        "logging_config",
        "external_scaler_enabled",
    ),
}


def check_keys(document: Mapping[str, Any]) -> None:
    """Raises ConfigError for a key that Serve does not know."""
    for at, section, allowed in _sections(document):
        for key in section:
            if key not in allowed:
                close = difflib.get_close_matches(str(key), allowed, n=1)
                hint = f"did you mean {close[0]}? " if close else ""
                raise ConfigError(f"unknown key {at}{key}; {hint}allowed here: {', '.join(allowed)}")


def check_values(document: Mapping[str, Any]) -> None:
    """Raises ConfigError for a value that Serve refuses, as it does only once it runs."""
    location = document.get("proxy_location", "HeadOnly")
    if location not in PROXY_LOCATIONS:
        raise ConfigError(f"proxy_location = {location!r}; allowed: {', '.join(PROXY_LOCATIONS)}")
    names: set[object] = set()
    prefixes: set[object] = set()
    for index, application in enumerate(document["applications"]):
        if not isinstance(application, Mapping):
            continue  # told elsewhere
        at = f"applications[{index}]"
        name, prefix = application.get("name", "default"), application.get("route_prefix", "/")
        if not isinstance(name, str) or not name or name in names:
            raise ConfigError(f"{at}.name = {name!r}; allowed: text that names no other application")
        if prefix is not None and (not _is_prefix(prefix) or prefix in prefixes):
            raise ConfigError(
                f"{at}.route_prefix = {prefix!r}; allowed: / or a path such as /llm, without a slash at "
                "its end, that is no other application's"
            )
        for key in ("host", "port"):
            if key in application:
                raise ConfigError(f"{at}.{key}: Serve takes it of all applications: http_options.{key}")
        names.add(name)
        prefixes.add(prefix)


def _is_prefix(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"/|/[^{}]*[^{}/]", value) is not None


def _sections(document: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], tuple[str, ...]]]:
    """Where it stands, what is there, what may be there. What is no mapping is told elsewhere."""
    yield "", document, KEYS[""]
    http = document.get("http_options")
    if isinstance(http, Mapping):
        yield "http_options.", http, KEYS["http_options"]
    for index, application in enumerate(document["applications"]):
        if isinstance(application, Mapping):
            yield f"applications[{index}].", application, KEYS["applications"]
