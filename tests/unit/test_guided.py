"""Answers bound to a rule: how clients ask for it, and who can."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from serving.engine.base import Capabilities, Guided
from serving.errors import InvalidRequest, RequestError, UnsupportedFeature
from serving.guided import choice
from serving.openai import parse_chat, sampling_params
from tests.tiny_tokenizer import tiny_model

ABLE = tiny_model(capabilities=Capabilities(guided=True))
UNABLE = tiny_model()
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))


def asked(**fields: Any) -> Guided | None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    return sampling_params(parse_chat(json.dumps(body).encode()), ABLE, 5).guided


RIGHT: dict[str, tuple[dict[str, Any], Guided | None]] = {
    "nothing": ({}, None),
    "text": ({"response_format": {"type": "text"}}, None),
    "any json": ({"response_format": {"type": "json_object"}}, Guided("json_object")),
    "schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
        Guided("json", TEXT),
    ),
    "guided_json": ({"guided_json": SCHEMA}, Guided("json", TEXT)),
    "guided_json as text": ({"guided_json": json.dumps(SCHEMA)}, Guided("json", TEXT)),
    "guided_regex": ({"guided_regex": "[a-c]+"}, Guided("regex", "[a-c]+")),
    "guided_grammar": ({"guided_grammar": 'root ::= "a"'}, Guided("grammar", 'root ::= "a"')),
    "guided_choice": ({"guided_choice": ["a", "b.c"]}, Guided("regex", r"(a|b\.c)")),
    "structured_outputs": ({"structured_outputs": {"json": SCHEMA}}, Guided("json", TEXT)),
    "structured json_object": ({"structured_outputs": {"json_object": True}}, Guided("json_object")),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_asked_for(name: str) -> None:
    fields, expected = RIGHT[name]
    assert asked(**fields) == expected


@pytest.mark.parametrize("name", [name for name, (_, guided) in RIGHT.items() if guided])
def test_an_engine_that_cannot_refuses_by_field(name: str) -> None:
    fields, _ = RIGHT[name]
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    with pytest.raises(UnsupportedFeature) as caught:
        sampling_params(parse_chat(json.dumps(body).encode()), UNABLE, 5)
    assert [caught.value.param] == list(fields)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "two rules": ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    "two rules inside": ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
    "unknown rule": ({"structured_outputs": {"poem": "a"}}, "structured_outputs"),
    "no schema": ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    "schema is a list": ({"guided_json": "[1]"}, "guided_json"),
    "schema is no json": ({"guided_json": "{"}, "guided_json"),
    "pattern": ({"guided_regex": "[unclosed"}, "guided_regex"),
    "long pattern": ({"guided_regex": "a" * 70_000}, "guided_regex"),
    "no choice": ({"guided_choice": []}, "guided_choice"),
    "empty choice": ({"guided_choice": ["a", ""]}, "guided_choice"),
    "too many choices": ({"guided_choice": ["a"] * 300}, "guided_choice"),
    "false": ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_malformed_names_its_field(name: str) -> None:
    fields, param = WRONG[name]
    with pytest.raises(RequestError) as caught:
        asked(**fields)
    assert isinstance(caught.value, InvalidRequest | UnsupportedFeature)
    assert caught.value.param == param


def test_a_choice_is_a_pattern_of_exactly_its_texts() -> None:
    texts = ["yes", "no (never)", "a|b", "50%", "\\"]
    pattern = re.compile(choice(texts).source)
    assert [text for text in (*texts, "a", "yes no", "never") if pattern.fullmatch(text)] == texts
