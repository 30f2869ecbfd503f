"""The operator's routes at a frontend's door: paths and bodies to the verbs of serving.admin and back.

    GET    /admin/workers                      who is there, how each stands, whether it is safe to remove
    POST   /admin/workers/{worker}/drain       no new requests; what runs there moves or ends
    POST   /admin/workers/{worker}/undrain
    DELETE /admin/workers/{worker}             take a drained one away: one replica less
    GET    /admin/settings                     the live settings
    PATCH  /admin/settings                     change some of them
    GET    /admin/weights                      the traffic shares of every model's variants
    PUT    /admin/weights/{model}              {"main": 90, "canary": 10}
    GET    /planner                            observation, decision, reason, history
    PATCH  /planner                            mode, targets and budget

All want the admin key as a bearer token; without a configured key none of them exists.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import unquote

import msgspec

from serving.errors import InvalidRequest, MethodNotAllowed, NotFound

Ask = Callable[[str, dict[str, Any]], Awaitable[tuple[int, dict[str, Any]]]]

# Path, method, verb, name of the path's argument (the body is then `body`, or merged into the arguments).
_ROUTES = (
    (r"/admin/workers", "GET", "workers", None),
    (r"/admin/workers/([^/]+)/drain", "POST", "drain", "worker"),
    (r"/admin/workers/([^/]+)/undrain", "POST", "undrain", "worker"),
    (r"/admin/workers/([^/]+)", "DELETE", "remove", "worker"),
    (r"/admin/settings", "GET", "settings", None),
    (r"/admin/settings", "PATCH", "change", None),
    (r"/admin/weights", "GET", "shares", None),
    (r"/admin/weights/(.+)", "PUT", "weights", "model"),
    (r"/planner", "GET", "planner", None),
    (r"/planner", "PATCH", "change_planner", None),
)
_BODY_OF = {"weights": "weights"}  # verbs whose whole body is one argument


def is_admin_path(path: str) -> bool:
    return path.startswith("/admin/") or path == "/planner"


def route(method: str, path: str, body: bytes) -> tuple[str, dict[str, Any]]:
    """The verb and its arguments. Raises NotFound, MethodNotAllowed, InvalidRequest."""
    allowed: list[str] = []
    for pattern, wanted, verb, name in _ROUTES:
        match = re.fullmatch(pattern, path)
        if match is None:
            continue
        allowed.append(wanted)
        if method == wanted or (method == "HEAD" and wanted == "GET"):
            arguments = {} if wanted == "GET" else _object(body)
            if verb in _BODY_OF:
                arguments = {_BODY_OF[verb]: arguments}
            if name is not None:
                arguments[name] = unquote(match.group(1))
            return verb, arguments
    if allowed:
        raise MethodNotAllowed(f"{method} does not go with this path; allowed: {', '.join(allowed)}")
    raise NotFound("there is nothing at this path")


def _object(body: bytes) -> dict[str, Any]:
    if not body.strip():
        return {}
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is no JSON object: {error}") from None
