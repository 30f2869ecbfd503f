"""The error tree: complete, drawn as it is, and one JSON shape for all."""

from __future__ import annotations

import inspect
import re

import pytest

from serving import errors
from serving.errors import KVRelayError, error_body

CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, KVRelayError)
}

# What clients see: DESIGN section 10.
STATUSES = {
    "InvalidRequest": (400, "invalid_request_error"),
    "UnsupportedFeature": (400, "invalid_request_error"),
    "ContextLengthExceeded": (400, "invalid_request_error"),
    "AuthenticationFailed": (401, "authentication_error"),
    "NotFound": (404, "not_found_error"),
    "ModelNotFound": (404, "not_found_error"),
    "MethodNotAllowed": (405, "invalid_request_error"),
    "BodyTimeout": (408, "invalid_request_error"),
    "BodyTooLarge": (413, "invalid_request_error"),
    "HeadersTooLarge": (431, "invalid_request_error"),
    "Overloaded": (429, "rate_limit_error"),
    "Overcrowded": (429, "rate_limit_error"),
    "Unavailable": (503, "service_unavailable"),
    "NoWorker": (503, "service_unavailable"),
    "WorkerLost": (503, "service_unavailable"),
    "Stopping": (503, "service_unavailable"),
    "DeadlineExceeded": (503, "service_unavailable"),
    "EngineFailure": (500, "server_error"),
}


def test_all_names_every_class_and_the_one_function() -> None:
    assert set(errors.__all__) == {*CLASSES, "error_body"}
    assert list(errors.__all__) == sorted(errors.__all__)


def test_the_drawing_shows_the_tree() -> None:
    """Indentation in the docstring's drawing puts every class below a class it derives from."""
    assert errors.__doc__ is not None
    way: list[str] = []
    drawn = {}
    for line in errors.__doc__.splitlines():
        node = re.match(r"^    (?P<lead>(?:[|`]  |   |[|`]- )*)(?P<name>[A-Z]\w+)", line)
        if node is None:
            continue
        depth = len(node["lead"]) // 3
        way[depth:] = [node["name"]]
        drawn[node["name"]] = way[depth - 1] if depth else "Exception"
    assert set(drawn) == set(CLASSES)
    for name, parent in drawn.items():
        assert parent in {base.__name__ for base in CLASSES[name].__mro__[1:]}, name


def test_every_class_stands_in_the_status_table_or_never_reaches_a_client() -> None:
    internal = {"KVRelayError", "RequestError", "ConfigError", "StartError"}
    internal |= {
        name for name, kind in CLASSES.items() if issubclass(kind, errors.LinkError | errors.TransferError)
    }
    assert set(STATUSES) == set(CLASSES) - internal


@pytest.mark.parametrize("name", STATUSES)
def test_statuses_and_bodies(name: str) -> None:
    error = CLASSES[name]("what went wrong")
    assert (error.status, error.type) == STATUSES[name]
    body = error_body(error)
    assert body == {
        "error": {"message": "what went wrong", "type": error.type, "param": None, "code": error.code}
    }
    assert str(error) == "what went wrong"


def test_only_what_a_retry_can_help_says_when() -> None:
    for name, kind in CLASSES.items():
        can_retry = issubclass(kind, errors.Overloaded | errors.Unavailable)
        assert (kind("x").retry_after_s is not None) == can_retry, name


def test_a_request_error_names_its_field() -> None:
    assert (
        error_body(errors.InvalidRequest("too hot", param="temperature"))["error"]["param"] == "temperature"
    )
