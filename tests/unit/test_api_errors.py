"""The HTTP layer: which status or event a client gets for its mistakes and for our faults."""

from __future__ import annotations

from typing import Any

import pytest

from serving.engine.base import FinishReason
from serving.errors import EngineFailure, KVRelayError, Overloaded, WorkerLost
from serving.generation import GenerationRequest, Sink
from tests.scripted import ScriptedGenerator, ScriptedTicket, make_client
from tests.tiny_tokenizer import CONTEXT_TOKENS
from tests.unit.api_rig import BOTH, STREAM, ask, text_of


@BOTH
@STREAM
async def test_unknown_model_404(endpoint: str, stream: bool) -> None:
    reply = await ask(make_client(), endpoint, model="nobody", stream=stream)
    assert reply.status == 404
    assert "nobody" in reply.json["error"]["message"]
    assert reply.json["error"]["code"] == "model_not_found"


async def test_an_endless_model_name_is_cut() -> None:
    reply = await make_client().chat(model="x" * 100_000)
    assert reply.status == 404
    assert len(reply.body) < 1000


@BOTH
@pytest.mark.parametrize("times", [1.05, 1.5, 4])
async def test_context_overflow_400(endpoint: str, times: float) -> None:
    client = make_client()
    known = text_of(await ask(client, endpoint), stream=False)
    long = "\u00e9" * int(CONTEXT_TOKENS * times)
    field: dict[str, Any] = {"prompt": long}
    if endpoint == "chat":
        field = {"messages": [{"role": "user", "content": long}]}
    reply = await ask(client, endpoint, **field)
    error = reply.json["error"]
    assert (reply.status, error["type"], error["code"]) == (
        400,
        "invalid_request_error",
        "context_length_exceeded",
    )
    assert str(CONTEXT_TOKENS) in error["message"]
    assert error["param"] in field
    assert text_of(await ask(client, endpoint), stream=False) == known


async def test_context_overflow_no_garbage() -> None:
    """Nothing beyond the context ever reaches the generator."""
    generator = ScriptedGenerator()
    client = make_client(generator)
    for text in ("x" * 10_000, "\u00e9" * CONTEXT_TOKENS, "word " * 10**6):
        assert (await client.complete(prompt=text)).status == 400
    assert (await client.complete(prompt=[5] * CONTEXT_TOKENS)).status == 400
    assert (await client.complete(prompt=[5] * (CONTEXT_TOKENS - 1))).status == 200
    assert [len(request.prompt) for request in generator.requests] == [CONTEXT_TOKENS - 1]
    assert generator.requests[0].params.max_tokens == 1


@pytest.mark.parametrize("length", [0.5, 3])
async def test_single_line_prompt(length: float) -> None:
    reply = await make_client().complete(prompt="ab3x" * int(CONTEXT_TOKENS * length / 4), max_tokens=1)
    assert reply.status == (200 if length < 1 else 400)


@pytest.mark.parametrize("prompt", [[], "", [""], [[]], ["a", ""], [[5], []], ["a", []]], ids=str)
async def test_empty_prompt_lists_survive(prompt: Any) -> None:
    client = make_client()
    reply = await client.complete(prompt=prompt)
    assert (reply.status, reply.json["error"]["param"]) == (400, "prompt")
    assert (await client.complete()).status == 200


async def test_token_ids_outside_the_vocabulary_are_refused() -> None:
    reply = await make_client().complete(prompt=[5, 10**6])
    assert (reply.status, reply.json["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize(
    ("error", "status", "header"),
    [
        (Overloaded("full", retry_after_s=3), 429, "3"),
        (WorkerLost("gone"), 503, "1"),
        (EngineFailure("x"), 500, None),
    ],
    ids=lambda v: type(v).__name__,
)
@pytest.mark.parametrize("refuse", [True, False])
@STREAM
async def test_an_error_before_the_first_token_is_a_status(
    error: KVRelayError, status: int, header: str | None, refuse: bool, stream: bool
) -> None:
    generator = ScriptedGenerator(refuse=error if refuse else None, error=error, answer=lambda request: [])
    reply = await make_client(generator).chat(stream=stream)
    assert reply.status == status
    assert reply.headers.get("retry-after") == header
    assert reply.json["error"]["type"] == error.type
    assert reply.complete


async def test_an_error_after_tokens_ends_the_stream() -> None:
    reply = await make_client(ScriptedGenerator(error=WorkerLost("the worker is gone"))).chat(stream=True)
    assert reply.status == 200
    assert reply.complete
    *chunks, last = reply.events
    assert chunks
    assert last == {
        "error": {
            "message": "the worker was lost and no other could go on; try again",
            "type": "service_unavailable",
            "param": None,
            "code": "worker_lost",
        }
    }


@STREAM
async def test_our_own_faults_are_not_shown(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    generator = ScriptedGenerator(error=EngineFailure("CUDA error at /secret/path.py"), per_step=2)
    reply = await make_client(generator).chat(stream=stream)
    assert b"secret" not in reply.body
    assert b"internal error" in reply.body
    assert "/secret/path.py" in caplog.text


async def test_an_unexpected_exception_is_a_500(caplog: pytest.LogCaptureFixture) -> None:
    def broken(request: GenerationRequest) -> list[int]:
        raise RuntimeError("secret")

    client = make_client(ScriptedGenerator(answer=broken))
    reply = await client.chat()
    assert reply.status == 500
    assert reply.json["error"]["type"] == "server_error"
    assert b"secret" not in reply.body
    assert "secret" in caplog.text


async def test_a_fault_in_the_sink_stays_in_its_request(caplog: pytest.LogCaptureFixture) -> None:
    class Nonsense:
        def start(self, request: GenerationRequest, sink: Sink) -> ScriptedTicket:
            sink.on_tokens(["not a token"], None)  # type: ignore[list-item]
            sink.on_finish(FinishReason.STOP)
            return ScriptedTicket(info=None)  # type: ignore[arg-type]

    reply = await make_client(Nonsense()).chat()  # type: ignore[arg-type]
    assert reply.status == 500
    assert "internal error" in caplog.text


async def test_error_closes_stream() -> None:
    reply = await make_client().chat(stream=True, n=0)
    assert (reply.status, reply.complete, reply.json["error"]["param"]) == (400, True, "n")


async def test_n_stream() -> None:
    reply = await make_client().chat(stream=True, n=2)
    assert (reply.status, reply.json["error"]["param"]) == (400, "n")


async def test_error_body_bounded() -> None:
    messages = [{"role": "user", "content": {"echoed": "x" * 100}}] * 400
    reply = await make_client().chat(messages=messages)
    assert reply.status == 400
    assert len(reply.body) < 2000
    assert b"echoed" not in reply.body


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e400"])
async def test_temperature_nan(number: str) -> None:
    client = make_client()
    body = (
        b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"temperature":'
        + number.encode()
        + b"}"
    )
    assert (await client.send("POST", "/v1/chat/completions", body)).status == 400
    assert (await client.chat()).status == 200
