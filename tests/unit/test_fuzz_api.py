"""Random and mutated requests at the HTTP door: every one ends in one answer, and none of them is a 500.

Longer: `--hypothesis-profile=fuzz-long`.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from serving.bodies import BodyLimits
from serving.door import Door
from tests.fuzzing import fuzzed, memory_under, mutated, split
from tests.scripted import ScriptedGenerator, make_client
from tests.tiny_tokenizer import tiny_model

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PATHS = st.sampled_from([CHAT, COMPLETIONS, "/v1/models", "/v1/models/tiny", "/health", "/metrics", "/"])
GOOD = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Héllo 👋"}]},
    ],
    "prompt": ["one", "two"],
    "max_tokens": 4,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.0,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {"5": 1.5},
    "seed": 7,
    "stop": ["x", "yz"],
    "stop_token_ids": [3],
    "stream": True,
    "stream_options": {"include_usage": True},
    "cache_salt": "s",
    "logprobs": None,
    "n": 1,
    "user": "somebody",
    "metadata": {"a": [1, 2, {"b": None}]},
}
FIELDS = sorted([*GOOD, "tools", "tool_choice", "response_format", "echo", "best_of", "top_logprobs"])
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
MODEL = tiny_model()
ORIGINALS = [
    json.dumps(GOOD).encode(),
    json.dumps(GOOD | {"stream": False}, ensure_ascii=False).encode(),
    json.dumps({"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 2}).encode(),
    json.dumps({"model": "tiny", "messages": GOOD["messages"]}).encode(),
]
HEADERS = st.lists(
    st.tuples(
        st.sampled_from(
            [b"x-request-id", b"x-session-id", b"x-request-timeout-ms", b"content-length", b"authorization",
             b"content-type", b"host"]
        )
        | st.binary(max_size=12),
        st.binary(max_size=40),
    ),
    max_size=6,
)  # fmt: skip


def ask(
    method: str, path: str, body: bytes, headers: list[tuple[bytes, bytes]], cuts: list[int]
) -> tuple[int, bytes]:
    """Status and body of the one answer that must come, within time and memory."""
    parts = split(body, cuts)
    sent: list[Any] = []

    async def receive() -> Any:
        if parts:
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}
        await asyncio.sleep(3600)

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> None:
        api = make_client(ScriptedGenerator(), [MODEL], door=Door(bodies=BodyLimits(body_bytes=4096))).api
        scope = {"type": "http", "method": method, "path": path, "headers": headers}
        try:
            async with asyncio.timeout(20):
                await api(scope, receive, send)
        finally:
            api._intake.close()

    asyncio.run(run())
    assert [m["type"] for m in sent].count("http.response.start") == 1
    assert sent[0]["type"] == "http.response.start"
    assert [m.get("more_body", False) for m in sent[1:]][-1] is False
    for name, value in sent[0]["headers"]:
        assert not set(name + value) & set(b"\r\n\0"), "what a client sent must not become a header"
    return sent[0]["status"], b"".join(m["body"] for m in sent[1:])


def check(status: int, body: bytes) -> None:
    assert status in (200, 400, 401, 404, 405, 413, 431), body
    if status != 200:
        assert len(body) < 4096
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}


@fuzzed(120)
@given(
    st.sampled_from(["GET", "POST", "HEAD", "PUT", "\x00"]),
    PATHS | st.text(max_size=30).map(lambda text: "/v1/" + text),
    st.binary(max_size=200),
    HEADERS,
    st.lists(st.integers(0, 200), max_size=3),
)
def test_any_request(
    method: str, path: str, body: bytes, headers: list[tuple[bytes, bytes]], cuts: list[int]
) -> None:
    check(*ask(method, path, body, headers, cuts))


@fuzzed(150)
@given(st.sampled_from([CHAT, COMPLETIONS]), mutated(ORIGINALS), st.lists(st.integers(0, 999), max_size=3))
def test_mutated_bodies(path: str, body: bytes, cuts: list[int]) -> None:
    check(*ask("POST", path, body, [], cuts))


@fuzzed(150)
@given(
    st.sampled_from([CHAT, COMPLETIONS]),
    st.dictionaries(st.sampled_from(FIELDS), JSON, min_size=1, max_size=3),
)
def test_fields_of_any_value(path: str, changes: dict[str, Any]) -> None:
    check(*ask("POST", path, json.dumps(GOOD | changes).encode(), [], []))


@fuzzed(40)
@given(st.sampled_from([b"[", b'{"a":', b'{"messages":[', b'"\\ud800']), st.integers(1, 4000))
def test_a_body_cannot_make_us_allocate_or_recurse(opening: bytes, times: int) -> None:
    with memory_under(8 << 20):
        status, body = ask("POST", CHAT, (opening * times)[:4096], [], [])
    check(status, body)
    assert status == 400
