"""What a request wants its answer bound to: a schema, any JSON, a pattern, a grammar, one of some texts.

OpenAI's `response_format`, and the fields that other servers made common: `guided_json`, `guided_regex`,
`guided_choice`, `guided_grammar`, and `structured_outputs` with the same inside. One of them a request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from serving.engine.base import Guided
from serving.errors import InvalidRequest, UnsupportedFeature

FIELDS = (
    "response_format",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
)
MAX_SOURCE_CHARS = 65_536
MAX_CHOICES = 256


def read_guided(body: object) -> tuple[str, Guided] | None:
    """(the field that asks for it, what it asks for) of a parsed body. Raises InvalidRequest, and
    UnsupportedFeature for a kind that nobody knows."""
    found: tuple[str, Guided] | None = None
    for field in FIELDS:
        value = getattr(body, field)
        guided = None if value is None else _read(field, value)
        if guided is None:
            continue
        if found is not None:
            raise InvalidRequest(f"{field} and {found[0]} both bind the answer: give one", param=field)
        found = field, guided
    return found


def choice(texts: Sequence[str]) -> Guided:
    """One of `texts`: no engine has such a rule, but a pattern says the same."""
    return Guided("regex", "(" + "|".join(re.escape(text) for text in texts) + ")")


def _read(field: str, value: Any) -> Guided | None:
    if field == "response_format":
        return _response_format(value)
    if field == "structured_outputs":
        if not isinstance(value, dict) or len(value) != 1:
            raise InvalidRequest(f"{field} must be an object with one rule", param=field)
        ((kind, inner),) = value.items()
        return _rule(kind, inner, field)
    return _rule(field.removeprefix("guided_"), value, field)


def _response_format(value: Any) -> Guided | None:
    field = "response_format"
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise InvalidRequest("response_format must be an object with a type", param=field)
    match value["type"]:
        case "text":
            return None
        case "json_object":
            return Guided("json_object")
        case "json_schema":
            given = value.get("json_schema")
            schema = given.get("schema") if isinstance(given, dict) else None
            if schema is None:
                raise InvalidRequest("response_format.json_schema must have a schema", param=field)
            return _rule("json", schema, field)
    raise UnsupportedFeature("response_format of that type is not supported", param=field)


def _rule(kind: Any, value: Any, field: str) -> Guided:
    match kind:
        case "json_object" if value is True:
            return Guided("json_object")
        case "json" if isinstance(value, dict | str):
            return Guided("json", _bounded(_schema(value, field), field))
        case "regex" if isinstance(value, str):
            return Guided("regex", _pattern(value, field))
        case "grammar" if isinstance(value, str) and value:
            return Guided("grammar", _bounded(value, field))
        case "choice" if _texts(value):
            return Guided("regex", _bounded(choice(value).source, field))
        case "json_object" | "json" | "regex" | "grammar" | "choice":
            raise InvalidRequest(f"{field} is malformed", param=field)
    raise UnsupportedFeature(f"{field} has a rule that is not supported", param=field)


def _schema(value: dict[str, Any] | str, field: str) -> str:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise InvalidRequest(f"{field} is no JSON", param=field) from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{field} must be a JSON schema", param=field)
    try:
        return json.dumps(value, separators=(",", ":"))
    except RecursionError:
        raise InvalidRequest(f"{field} is nested too deeply", param=field) from None


def _pattern(value: str, field: str) -> str:
    """Dialects differ in what they know beyond the basics; what none can read is refused here."""
    _bounded(value, field)
    try:
        re.compile(value)
    except (re.error, RecursionError, OverflowError):
        raise InvalidRequest(f"{field} is no regular expression", param=field) from None
    return value


def _texts(value: Any) -> bool:
    return (
        isinstance(value, list)
        and 0 < len(value) <= MAX_CHOICES
        and all(isinstance(text, str) and text for text in value)
    )


def _bounded(text: str, field: str) -> str:
    if len(text) > MAX_SOURCE_CHARS:
        raise InvalidRequest(f"{field} is longer than {MAX_SOURCE_CHARS} characters", param=field)
    return text
