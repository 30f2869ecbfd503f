"""Bodies that are refused, and which field a refusal names."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.errors import InvalidRequest, RequestError
from serving.openai import parse_chat, parse_completion, sampling_params
from tests.tiny_tokenizer import tiny_model
from tests.unit.openai_bodies import HELLO, chat, completion, refused

BAD_IN_BOTH: list[tuple[str, Any]] = [
    ("max_tokens", "3"),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("max_tokens", -1),
    ("max_tokens", 0),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "hot"),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_k", -2),
    ("min_p", 1.5),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -2.5),
    ("repetition_penalty", 0),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", [1]),
    ("seed", 1 << 63),
    ("seed", 1.5),
    ("stop", ""),
    ("stop", [""]),
    ("stop", ["a", "b", "c", "d", "e"]),
    ("stop", [1]),
    ("stop", {"a": 1}),
    ("stop", "x" * 2000),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", "1"),
    ("min_tokens", -1),
    ("ignore_eos", "yes"),
    ("n", 0),
    ("n", 2),
    ("n", "1"),
    ("stream", "true"),
    ("stream_options", True),
    ("cache_salt", ""),
    ("cache_salt", 5),
    ("model", 5),
    ("model", None),
    ("best_of", 2),
    ("suffix", "end"),
    ("guided_json", [1]),
    ("guided_regex", "[unclosed"),
    ("guided_choice", []),
    ("guided_grammar", ""),
    ("use_beam_search", True),
    ("prompt_logprobs", 1),
    ("response_format", {"type": "xml"}),
]


@pytest.mark.parametrize(("field", "value"), BAD_IN_BOTH, ids=lambda v: str(v)[:24])
@pytest.mark.parametrize("parse", [chat, completion])
def test_a_refusal_names_the_field(parse: Any, field: str, value: Any) -> None:
    assert refused(parse, **{field: value}).param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("prediction", {"type": "content", "content": "x"}),
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("web_search_options", {}),
        ("echo", True),
        ("chat_template", "{{ messages }}"),
        ("continue_final_message", True),
        ("top_logprobs", 21),
        ("top_logprobs", 3),  # without logprobs
        ("logprobs", 3),
        ("max_completion_tokens", 0),
        ("messages", None),
        ("messages", "hi"),
        ("messages", []),
        ("messages", {}),
    ],
    ids=lambda v: str(v)[:24],
)
def test_a_chat_refusal_names_the_field(field: str, value: Any) -> None:
    assert refused(chat, **{field: value}).param == field


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [1, [1]]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1 << 40]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["x"] * 300}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": True, "logprobs": 1}, "logprobs"),
        ({"echo": "yes"}, "echo"),
    ],
    ids=str,
)
def test_a_completion_refusal_names_the_field(fields: dict[str, Any], param: str) -> None:
    assert refused(completion, **fields).param == param


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"text": "x"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content"),
        ({"role": "wizard", "content": "x"}, "messages[0].role"),
        ({"role": 5, "content": "x"}, "messages[0].role"),
        ("x", "messages[0]"),
        (None, "messages[0]"),
    ],
    ids=str,
)
def test_a_message_refusal_names_the_message(message: Any, param: str) -> None:
    assert refused(chat, messages=[message]).param == param


def test_missing_fields() -> None:
    for body in (b'{"model": "m"}', b'{"model": "m", "messages": []}', b'{"model": "m", "messages": "hi"}'):
        with pytest.raises(InvalidRequest) as caught:
            parse_chat(body)
        assert caught.value.param == "messages"
    assert refused(chat, messages=[{"role": "assistant", "content": "hi"}]).param == "messages"
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(b'{"messages": [{"role": "user", "content": "x"}]}')
    assert caught.value.param == "model"
    with pytest.raises(InvalidRequest) as caught:
        parse_completion(b'{"model": "m"}')
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b"\xff\xfe",
        b'{"model": "\xff", "messages": []}',
        b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "m", "user": ' + b"[" * 100_000,
        b'{"model": "m"} trailing',
    ],
    ids=lambda body: repr(body[:30]),
)
def test_bad_json(body: bytes) -> None:
    for parse in (parse_chat, parse_completion):
        with pytest.raises(InvalidRequest) as caught:
            parse(body)
        assert len(caught.value.message) < 400


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e400", b"-1e400", b"9" * 5000])
@pytest.mark.parametrize("field", [b"temperature", b"top_p", b"presence_penalty", b"max_tokens"])
def test_temperature_nan(field: bytes, number: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_chat(
            b'{"model": "m", "messages": [{"role":"user","content":"x"}], "'
            + field
            + b'": '
            + number
            + b"}"
        )
    with pytest.raises(InvalidRequest):
        parse_completion(b'{"model": "m", "prompt": "p", "' + field + b'": ' + number + b"}")


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_escape_the_door(body: bytes) -> None:
    for parse in (parse_chat, parse_completion):
        with pytest.raises(RequestError):
            parse(body)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None)
@given(
    st.sampled_from([field for field, _ in BAD_IN_BOTH] + ["messages", "prompt", "tools", "logprobs"]),
    json_values,
)
def test_any_value_of_any_field_is_taken_or_refused(field: str, value: Any) -> None:
    for parse, base in ((parse_chat, {"messages": HELLO}), (parse_completion, {"prompt": "p"})):
        try:
            body = parse(json.dumps({"model": "m", **base, field: value}).encode())
        except RequestError:
            continue
        if body.max_tokens != 0:
            try:
                sampling_params(body, tiny_model(), 10)
            except RequestError:
                continue


def test_error_body_bounded() -> None:
    noise = "SECRET" * 50
    error = refused(chat, messages=[{"role": noise, "content": {noise: noise}}] * 400)
    assert len(error.message) < 400
    assert "SECRET" not in error.message
    assert "SECRET" not in refused(chat, messages=[{"role": noise, "content": "x"}]).message
    assert "SECRET" not in refused(chat, response_format={"type": noise}).message
    assert "SECRET" not in refused(chat, logit_bias={noise: 1}).message


@pytest.mark.parametrize(
    "value",
    [
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {}},
        {"schema": {}},
        "json",
        5,
        [],
        {"type": 1},
    ],
    ids=str,
)
def test_response_format_malformed_400(value: Any) -> None:
    error = refused(chat, response_format=value)
    assert error.status == 400
    assert error.param == "response_format"


def test_bad_guided_regex_survives() -> None:
    error = refused(chat, guided_regex="[unclosed")
    assert error.status == 400
    assert error.param == "guided_regex"


def test_n_not_ignored() -> None:
    error = refused(chat, n=3)
    assert (error.status, error.param) == (400, "n")
