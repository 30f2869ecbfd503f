"""The HTTP layer over a scripted generator: routes, ids, bodies on their way in, and the access log."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from serving.bodies import BodyLimits
from serving.door import Door
from tests.scripted import ScriptedGenerator, make_client
from tests.tiny_tokenizer import ids, tiny_model

# ---------------------------------------------------------------- routes


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/health", 200),
        ("GET", "/metrics", 200),
        ("HEAD", "/health", 200),
        ("GET", "/v1/models", 200),
        ("GET", "/v1/models/tiny", 200),
        ("GET", "/v1/models/other", 404),
        ("GET", "/", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/chat/completions", 405),
        ("PUT", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
        ("POST", "/metrics", 405),
    ],
)
async def test_routes(method: str, path: str, status: int) -> None:
    reply = await make_client().send(method, path)
    assert reply.status == status
    assert reply.complete
    assert reply.headers["x-request-id"]
    if status >= 400:
        assert set(reply.json["error"]) == {"message", "type", "param", "code"}
    if status == 405:
        assert reply.headers["allow"]


async def test_model_names_with_slashes_are_found() -> None:
    client = make_client(models=[tiny_model("org/tiny")])
    assert (await client.send("GET", "/v1/models/org/tiny")).json["id"] == "org/tiny"


async def test_a_request_id_is_kept_or_made() -> None:
    client = make_client()
    kept = await client.send("GET", "/health", headers={"X-Request-Id": "abc-1"})
    assert kept.headers["x-request-id"] == "abc-1"
    for bad in ("", "a b", "x" * 200, "a\nb"):
        made = (await client.send("GET", "/health", headers={"X-Request-Id": bad})).headers["x-request-id"]
        assert made != bad
        assert len(made) == 32


async def test_the_request_id_and_time_limit_reach_the_generator() -> None:
    generator = ScriptedGenerator()
    client = make_client(generator)
    body = {"model": "tiny", "prompt": ["a", "b"], "cache_salt": "s"}
    headers = {"x-request-id": "r", "x-request-timeout-ms": "1500", "x-session-id": "s1"}
    assert (await client.send("POST", "/v1/completions", body, headers)).status == 200
    assert [r.request_id for r in generator.requests] == ["r-0", "r-1"]
    assert {(r.timeout_ms, r.session, r.cache_salt, r.model) for r in generator.requests} == {
        (1500.0, "s1", "s", "tiny")
    }


@pytest.mark.parametrize("value", ["", "x", "0", "-5", "nan", "inf", "1e99"])
async def test_a_bad_time_limit_is_refused(value: str) -> None:
    headers = {"x-request-timeout-ms": value}
    reply = await make_client().send("POST", "/v1/completions", {"model": "tiny", "prompt": "a"}, headers)
    assert (reply.status, reply.json["error"]["param"]) == (400, "x-request-timeout-ms")


@pytest.mark.parametrize("announced", [False, True])
async def test_a_body_over_the_limit_is_refused(announced: bool) -> None:
    client = make_client(door=Door(bodies=BodyLimits(body_bytes=2000)))
    body = b'{"model": "tiny", "prompt": "' + b"x" * 3000 + b'"}'
    headers = {"content-length": str(len(body))} if announced else {}
    reply = await client.send("POST", "/v1/completions", body, headers, parts=5)
    assert (reply.status, reply.json["error"]["code"]) == (413, "body_too_large")
    assert (await client.complete()).status == 200


async def test_a_body_in_pieces_is_joined() -> None:
    body = {"model": "tiny", "prompt": "one two"}
    assert (await make_client().send("POST", "/v1/completions", body, parts=7)).status == 200


async def test_lifespan() -> None:
    messages = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message["type"])

    await make_client().api({"type": "lifespan"}, receive, send)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


# ---------------------------------------------------------------- access log


async def test_one_access_record_a_generation(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="kvrelay.access")
    client = make_client(ScriptedGenerator(cached_tokens=1))
    headers = {"x-request-id": "r1"}
    body = {"model": "tiny", "prompt": "one two", "stream": True}
    await client.send("POST", "/v1/completions", body, headers)
    await client.send("POST", "/v1/completions", {**body, "model": "nobody"}, headers)
    good, bad = [r.__dict__["fields"] for r in caplog.records if r.name == "kvrelay.access"]
    assert good["request_id"] == bad["request_id"] == "r1"
    assert (good["status"], good["finish"], good["error"]) == (200, "stop", None)
    assert good["prompt_tokens"] == len(ids("one two"))
    assert (good["completion_tokens"], good["cached_tokens"]) == (len(ids("Hello, world!")), 1)
    assert 0 <= good["ttft_s"] <= good["duration_s"]
    assert (good["prefill_worker"], good["decode_worker"]) == ("prefill-1", "decode-1")
    assert (bad["status"], bad["error"], bad["completion_tokens"]) == (404, "model_not_found", None)
