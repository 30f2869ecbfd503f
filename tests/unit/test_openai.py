"""Bodies: what is accepted, what is refused, and which field a refusal names."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.engine.base import Capabilities
from serving.errors import ContextLengthExceeded, InvalidRequest, RequestError, UnsupportedFeature
from serving.messages import template_messages
from serving.openai import parse_chat, parse_completion, sampling_params
from tests.tiny_tokenizer import tiny_model

HELLO = [{"role": "user", "content": "Hello"}]


def chat(**fields: Any) -> Any:
    return parse_chat(json.dumps({"model": "m", "messages": HELLO, **fields}).encode())


def completion(**fields: Any) -> Any:
    return parse_completion(json.dumps({"model": "m", "prompt": "p", **fields}).encode())


def refused(parse: Any, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    assert len(caught.value.message) <= 400
    return caught.value


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


def test_unknown_fields_accepted() -> None:
    chat(
        user="u",
        metadata={"a": "b"},
        store=True,
        service_tier="auto",
        vendor={"deep": [1, {}]},
        verbosity="low",
    )
    completion(user="u", metadata={"a": "b"}, vendor=[1])


def test_neutral_values_of_refused_fields_are_accepted() -> None:
    chat(
        n=1,
        best_of=1,
        response_format={"type": "text"},
        tools=[],
        tool_choice="auto",
        functions=[],
        modalities=["text"],
        suffix="",
        guided_json=None,
    )


def test_null_means_the_default() -> None:
    fields = [
        "max_tokens",
        "temperature",
        "top_p",
        "stop",
        "seed",
        "logprobs",
        "stream",
        "stream_options",
        "n",
    ]
    body = chat(**dict.fromkeys(fields))
    assert sampling_params(body, tiny_model(), 10).temperature == 1.0


def test_tool_many() -> None:
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": {}}} for i in range(20)]
    chat(tools=tools, tool_choice="none")


def test_n_not_ignored() -> None:
    error = refused(chat, n=3)
    assert (error.status, error.param) == (400, "n")


def test_sampling_params_take_every_field() -> None:
    body = chat(
        max_tokens=7,
        seed=-1,
        temperature=0,
        top_p=0.5,
        top_k=40,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        logit_bias={"5": -100},
        stop_token_ids=[3, 4],
        ignore_eos=True,
        min_tokens=2,
        logprobs=True,
        top_logprobs=4,
    )
    params = sampling_params(body, tiny_model(), 10)
    assert params.max_tokens == 7
    assert params.seed == (1 << 64) - 1
    assert params.is_greedy
    assert (params.top_p, params.top_k, params.min_p) == (0.5, 40, 0.1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1, -1, 1.5)
    assert params.logit_bias == {5: -100.0}
    assert (params.stop_token_ids, params.ignore_eos, params.min_tokens) == ((3, 4), True, 2)
    assert params.logprobs == 4


@pytest.mark.parametrize("off", [-1, 0, None])
def test_top_k_off(off: int | None) -> None:
    assert sampling_params(chat(top_k=off), tiny_model(), 10).top_k is None


def test_no_seed_varies() -> None:
    seeds = {sampling_params(chat(), tiny_model(), 10).seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 1 << 64 for seed in seeds)


def test_seed_repeats() -> None:
    assert {sampling_params(chat(seed=7), tiny_model(), 10).seed for _ in range(5)} == {7}


def test_max_completion_tokens() -> None:
    assert sampling_params(chat(max_completion_tokens=3), tiny_model(), 10).max_tokens == 3
    assert sampling_params(chat(max_completion_tokens=3, max_tokens=9), tiny_model(), 10).max_tokens == 3


def test_default_max_tokens() -> None:
    model = tiny_model(context_tokens=100)
    assert sampling_params(chat(), model, 30).max_tokens == 70
    assert sampling_params(completion(), model, 30).max_tokens == 16
    assert sampling_params(completion(), model, 95).max_tokens == 5


def test_context_overflow_says_numbers() -> None:
    model = tiny_model(context_tokens=100)
    with pytest.raises(ContextLengthExceeded) as caught:
        sampling_params(chat(), model, 150)
    assert "150" in caught.value.message
    assert "100" in caught.value.message
    with pytest.raises(ContextLengthExceeded) as caught:
        sampling_params(chat(max_tokens=31), model, 70)
    assert all(number in caught.value.message for number in ("70", "31", "100"))
    assert sampling_params(chat(max_tokens=30), model, 70).max_tokens == 30


@pytest.mark.parametrize("n", [10**9, 10**18, 10**30, 10**300])
def test_huge_max_tokens(n: int) -> None:
    with pytest.raises(ContextLengthExceeded) as caught:
        sampling_params(chat(max_tokens=n), tiny_model(), 10)
    assert caught.value.param == "max_tokens"
    assert len(caught.value.message) < 300


def test_logit_bias_out_of_vocab() -> None:
    for fields in ({"logit_bias": {"99999999": 1}}, {"stop_token_ids": [99999999]}):
        with pytest.raises(InvalidRequest) as caught:
            sampling_params(chat(**fields), tiny_model(), 10)
        assert caught.value.param in fields


def test_min_tokens() -> None:
    assert sampling_params(chat(min_tokens=40), tiny_model(), 10).min_tokens == 40
    with pytest.raises(InvalidRequest) as caught:
        sampling_params(chat(min_tokens=40, max_tokens=39), tiny_model(), 10)
    assert caught.value.param == "min_tokens"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": True}, "logprobs"),
        ({"logit_bias": {"1": 1}}, "logit_bias"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ],
)
def test_what_the_engine_lacks_is_refused(fields: dict[str, Any], param: str) -> None:
    model = tiny_model(capabilities=Capabilities(logprobs=False, logit_bias=False, penalties=False))
    with pytest.raises(UnsupportedFeature) as caught:
        sampling_params(chat(**fields), model, 10)
    assert caught.value.param == param
    neutral = chat(
        presence_penalty=0, frequency_penalty=0.0, repetition_penalty=1, logprobs=False, logit_bias={}
    )
    sampling_params(neutral, model, 10)


def test_content_parts_equal_text() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert template_messages(
        chat(messages=[{"role": "user", "content": parts}]).messages
    ) == template_messages(chat().messages)


def test_tool_content_stays_text() -> None:
    messages = [*HELLO, {"role": "tool", "tool_call_id": "c1", "content": "[1, 2, 3]"}]
    assert template_messages(chat(messages=messages).messages)[1]["content"] == "[1, 2, 3]"


def test_assistant_with_tool_calls() -> None:
    """Arguments are JSON text on the wire and an object in templates; anything else is passed as it is."""
    calls = [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": a}}
        for a in ('{"x": 1}', "{")
    ]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    (_, rendered) = template_messages(chat(messages=[*HELLO, message]).messages)
    assert rendered["content"] == ""
    assert [c["function"]["arguments"] for c in rendered["tool_calls"]] == [{"x": 1}, "{"]
