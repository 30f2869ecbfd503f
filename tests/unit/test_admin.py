"""The operator's routes and verbs, and orders that outlive Control."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serving.admin_api import route
from serving.errors import InvalidRequest, KVRelayError, MethodNotAllowed, NotFound
from serving.orders import OrderBook


@pytest.mark.parametrize(
    ("method", "path", "body", "verb", "arguments"),
    [
        ("GET", "/admin/workers", b"", "workers", {}),
        ("POST", "/admin/workers/a%23b/drain", b"", "drain", {"worker": "a#b"}),
        ("POST", "/admin/workers/w/undrain", b"", "undrain", {"worker": "w"}),
        ("GET", "/admin/settings", b"", "settings", {}),
        ("PATCH", "/admin/settings", b'{"log_level": "DEBUG"}', "change", {"log_level": "DEBUG"}),
        ("GET", "/admin/weights", b"", "shares", {}),
        ("PUT", "/admin/weights/org/m", b'{"a": 1}', "weights", {"model": "org/m", "weights": {"a": 1}}),
        ("GET", "/planner", b"", "planner", {}),
        ("PATCH", "/planner", b'{"mode": "act"}', "change_planner", {"mode": "act"}),
    ],
)
def test_paths_become_verbs(
    method: str, path: str, body: bytes, verb: str, arguments: dict[str, Any]
) -> None:
    assert route(method, path, body) == (verb, arguments)


@pytest.mark.parametrize(
    ("method", "path", "body", "error", "says"),
    [
        ("GET", "/admin/nothing", b"", NotFound, "nothing"),
        ("DELETE", "/admin/workers", b"", MethodNotAllowed, "allowed: GET"),
        ("GET", "/admin/workers/w/drain", b"", MethodNotAllowed, "allowed: POST"),
        ("PATCH", "/admin/settings", b"[1]", InvalidRequest, "JSON object"),
        ("PATCH", "/admin/settings", b"\xff{", InvalidRequest, "JSON object"),
    ],
)
def test_what_is_no_route(
    method: str, path: str, body: bytes, error: type[KVRelayError], says: str
) -> None:
    with pytest.raises(error, match=says):
        route(method, path, body)


def test_orders_are_kept_and_restored() -> None:
    kept: list[dict[str, Any]] = []
    book = OrderBook(kept.append)
    book.drain("a")
    book.drain("a")
    book.lend("b", "prefill")
    assert len(kept) == 2  # what changes nothing is not told
    again = OrderBook()
    again.restore(json.loads(json.dumps(kept[-1])))
    assert (again.draining, again.roles) == ({"a"}, {"b": "prefill"})
    again.undrain("a")
    again.call_back("b")
    assert (again.draining, again.roles) == (set(), {})
    again.lend("b", "decode")
    again.drain("b")
    again.forget("b")
    assert (again.draining, again.roles) == (set(), {})


def test_orders_that_are_none_are_left_out() -> None:
    book = OrderBook()
    book.restore({"draining": "everything", "roles": {"a": "emperor", "b": "decode"}})
    assert (book.draining, book.roles) == (set(), {"b": "decode"})


def test_versions_grow() -> None:
    book = OrderBook()
    first = book.message().version
    book.drain("a")
    assert book.message().version > first
