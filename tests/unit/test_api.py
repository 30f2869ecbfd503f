"""The HTTP layer over a scripted generator: routes, bodies, ids, and how a request ends."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from typing import Any

import pytest

from serving.door import Door
from serving.engine.base import FinishReason
from serving.errors import EngineFailure, KVRelayError, Overloaded, WorkerLost
from serving.generation import GenerationRequest, Sink
from tests.scripted import Client, ScriptedGenerator, ScriptedTicket, make_client
from tests.tiny_tokenizer import CONTEXT_TOKENS, ids, tiny_model

BOTH = pytest.mark.parametrize("endpoint", ["chat", "complete"])
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


async def ask(client: Client, endpoint: str, **fields: Any) -> Any:
    return await (client.chat(**fields) if endpoint == "chat" else client.complete(**fields))


def text_of(reply: Any, stream: bool, index: int = 0) -> str:
    if stream:
        return str(reply.text(index))
    choice = reply.json["choices"][index]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


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
    client = make_client(door=Door(body_limit_bytes=2000))
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


# ---------------------------------------------------------------- errors


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


# ---------------------------------------------------------------- streaming


@BOTH
async def test_finish_reason_last(endpoint: str) -> None:
    reply = await ask(make_client(), endpoint, stream=True)
    *chunks, finish = reply.chunks
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert finish["choices"][0].get("text", "") == ""
    assert finish["choices"][0].get("delta", {}) == {}
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert reply.text() == "Hello, world!"


@BOTH
@pytest.mark.parametrize("per_step", [1, 100])
async def test_finish_reason_once(endpoint: str, per_step: int) -> None:
    client = make_client(ScriptedGenerator(per_step=per_step))
    reply = await ask(client, endpoint, stream=True, stream_options={"include_usage": True})
    assert reply.reasons() == ["stop"]
    *chunks, usage = reply.chunks
    assert usage["usage"]["completion_tokens"] == len(ids("Hello, world!"))
    assert all(chunk["usage"] is None for chunk in chunks)


@BOTH
async def test_finish_reason_key_always(endpoint: str) -> None:
    reply = await ask(make_client(), endpoint, stream=True)
    assert all("finish_reason" in choice for chunk in reply.chunks for choice in chunk["choices"])


@BOTH
async def test_natural_stop_reported(endpoint: str) -> None:
    assert (await ask(make_client(), endpoint, stream=True)).reasons() == ["stop"]


async def test_role_in_first_chunk() -> None:
    deltas = [c["choices"][0]["delta"] for c in (await make_client().chat(stream=True)).chunks]
    assert deltas[0]["role"] == "assistant"
    assert all("role" not in delta for delta in deltas[1:])


@pytest.mark.parametrize("answer", ["", "Hello"])
async def test_role_even_when_empty(answer: str) -> None:
    """No answer at all, and one that a stop string cuts to nothing."""
    client = make_client(ScriptedGenerator(answer=lambda request: ids(answer)))
    reply = await client.chat(stream=True, stop=["H"])
    deltas = [c["choices"][0]["delta"] for c in reply.chunks]
    assert deltas == [{"role": "assistant", "content": ""}, {}]
    assert reply.reasons() == ["stop"]


@BOTH
@STREAM
async def test_stop_chat_not_leaked(endpoint: str, stream: bool) -> None:
    generator = ScriptedGenerator()
    reply = await ask(make_client(generator), endpoint, stream=stream, stop=["o"])
    assert text_of(reply, stream) == "Hell"
    if not stream:
        assert reply.json["choices"][0]["finish_reason"] == "stop"


@STREAM
@pytest.mark.parametrize("per_step", [1, 3, 100])
async def test_stop_on_token_path(stream: bool, per_step: int) -> None:
    """A stop string cancels upstream; usage counts up to the token that completed it."""
    answer = ids("one two three four five six")
    generator = ScriptedGenerator(answer=lambda request: answer, per_step=per_step)
    fields: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    reply = await make_client(generator).chat(stop=["three"], **fields)
    assert text_of(reply, stream) == "one two "
    assert generator.tickets[0].cancelled
    assert len(generator.sent) < len(answer) or per_step == 100
    usage = reply.chunks[-1]["usage"] if stream else reply.json["usage"]
    assert usage["completion_tokens"] == len(ids("one two three"))


@STREAM
@pytest.mark.parametrize("synchronous", [False, True])
async def test_stop_tail_flushed(stream: bool, synchronous: bool) -> None:
    generator = ScriptedGenerator(answer=lambda request: ids("one two three"), synchronous=synchronous)
    n = len(ids("one two"))
    reply = await make_client(generator).chat(stream=stream, max_tokens=n, stop=["two!"])
    assert text_of(reply, stream) == "one two"
    assert (reply.reasons() if stream else [reply.json["choices"][0]["finish_reason"]]) == ["length"]


async def test_a_sink_called_before_the_ticket_is_known() -> None:
    generator = ScriptedGenerator(synchronous=True, cached_tokens=2)
    client = make_client(generator)
    reply = await client.complete(
        stream=True, prompt=["a b", "c d"], stream_options={"include_usage": True}
    )
    assert [reply.text(0), reply.text(1)] == ["Hello, world!"] * 2
    assert reply.chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
    stopped = await client.chat(stream=True, stop=["o"])
    assert stopped.text() == "Hell"
    assert generator.tickets[-1].cancelled


@BOTH
async def test_usage_choices_field_present(endpoint: str) -> None:
    reply = await ask(make_client(), endpoint, stream=True, stream_options={"include_usage": True})
    assert all("choices" in chunk for chunk in reply.chunks)
    assert all("usage" not in chunk for chunk in (await ask(make_client(), endpoint, stream=True)).chunks)


async def test_long_prompt_stream_ends() -> None:
    prompt = "\u00e9" * (CONTEXT_TOKENS // 4)
    reply = await make_client().complete(prompt=prompt, stream=True, max_tokens=3)
    assert reply.reasons() == ["length"]


async def test_quiet_streams_get_keep_alives() -> None:
    client = make_client(ScriptedGenerator(hang=True), keep_alive_s=0.02)
    client.leave_after = b": keep-alive\n\n"
    reply = await client.chat(stream=True)
    assert reply.status == 200
    quiet = make_client(ScriptedGenerator(answer=lambda request: [], hang=True), keep_alive_s=0.02)
    quiet.leave_after = b": keep-alive\n\n"
    assert (await quiet.chat(stream=True)).body == b": keep-alive\n\n" * 3


async def test_an_error_after_a_keep_alive_is_an_event() -> None:
    class Late(ScriptedGenerator):
        def _run(self, *state: Any) -> None:
            asyncio.get_running_loop().call_later(0.05, super()._run, *state)

    generator = Late(answer=lambda request: [], error=WorkerLost("gone"))
    reply = await make_client(generator, keep_alive_s=0.02).chat(stream=True)
    assert reply.status == 200
    assert reply.events == [{"error": {**reply.events[0]["error"], "code": "worker_lost"}}]


@STREAM
async def test_a_client_that_leaves_cancels(stream: bool) -> None:
    generator = ScriptedGenerator(hang=True)
    records: list[Any] = []
    client = make_client(generator, on_end=records.append)
    asyncio.get_running_loop().call_later(0.02, client.leave.set)
    await client.chat(stream=stream)
    assert generator.tickets[0].cancelled
    assert [record.client_left for record in records] == [True]
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1


# ---------------------------------------------------------------- prompts


def echo_prompt(request: GenerationRequest) -> list[int]:
    """A model whose answer depends on its prompt alone."""
    return list(request.prompt)[:3]


@STREAM
async def test_batch_order(stream: bool) -> None:
    prompts = ["one two three", "four five six", "seven eight nine", "fox"]
    client = make_client(ScriptedGenerator(answer=echo_prompt))
    single = [text_of(await client.complete(prompt=p), stream=False) for p in prompts]
    for order in (prompts, prompts[::-1]):
        reply = await client.complete(prompt=order, stream=stream)
        assert [text_of(reply, stream, i) for i in range(4)] == [single[prompts.index(p)] for p in order]


async def test_batch_stream_index() -> None:
    client = make_client(ScriptedGenerator(answer=echo_prompt))
    reply = await client.complete(prompt=[ids("one"), ids("two"), ids("fox"), ids("dog")], stream=True)
    assert [reply.text(i) for i in range(4)] == ["one", "two", "fox", "dog"]
    assert all(reply.reasons(i) == ["stop"] for i in range(4))


async def test_one_bad_prompt_fails_the_whole_request() -> None:
    generator = ScriptedGenerator(error=WorkerLost("gone"), answer=lambda request: [])
    reply = await make_client(generator).complete(prompt=["a", "b", "c"])
    assert reply.status == 503
    assert all(ticket.cancelled for ticket in generator.tickets)


@STREAM
@pytest.mark.parametrize(
    "prompt", ["The quick fox \U0001f389", ids("The quick fox \U0001f389")], ids=["text", "ids"]
)
async def test_echo_no_extra_token(stream: bool, prompt: Any) -> None:
    generator = ScriptedGenerator()
    fields: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    reply = await make_client(generator).complete(
        prompt=prompt, echo=True, max_tokens=0, stream=stream, **fields
    )
    assert text_of(reply, stream) == "The quick fox \U0001f389"
    usage = reply.chunks[-1]["usage"] if stream else reply.json["usage"]
    assert usage["completion_tokens"] == 0
    assert usage["prompt_tokens"] == len(ids("The quick fox \U0001f389"))
    assert not generator.requests


@STREAM
async def test_echo_goes_before_the_answer(stream: bool) -> None:
    reply = await make_client().complete(prompt="one two", echo=True, max_tokens=2, stream=stream)
    assert text_of(reply, stream) == "one twoHello"


@STREAM
async def test_echo_stream_logprobs(stream: bool) -> None:
    reply = await make_client().complete(echo=True, logprobs=1, max_tokens=0, stream=stream)
    assert (reply.status, reply.json["error"]["param"]) == (400, "logprobs")


async def test_echo_max_tokens_zero() -> None:
    client = make_client()
    assert (await client.complete(echo=True, max_tokens=0)).status == 200
    assert (await client.complete(max_tokens=0)).status == 400


async def test_roles_not_alternating() -> None:
    roles = [{"role": role, "content": "x"} for role in ("system", "user", "user")]
    reply = await make_client().chat(messages=roles)
    assert reply.status == 400
    assert "roles must alternate" in reply.json["error"]["message"]


async def test_assistant_with_tool_calls() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "[1, 2, 3]"},
    ]
    assert (await make_client().chat(messages=messages)).status == 200


async def test_content_parts_equal_text() -> None:
    client = make_client(ScriptedGenerator(answer=echo_prompt))
    parts = [{"type": "text", "text": "Hello"}]
    one, other = [
        (await client.chat(messages=[{"role": "user", "content": c}])).json for c in ("Hello", parts)
    ]
    assert one["usage"] == other["usage"]
    assert one["choices"] == other["choices"]


@pytest.mark.parametrize(
    ("choice", "status"), [("required", 400), ("auto", 400), (None, 400), ("none", 200)]
)
async def test_tool_reason_matches_calls(choice: str | None, status: int) -> None:
    """Tools are not supported: refused where a call could come, an ordinary answer where none may."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    reply = await make_client().chat(tools=tools, tool_choice=choice)
    assert reply.status == status
    if status == 400:
        assert reply.json["error"]["param"] == "tools"
    else:
        assert reply.json["choices"][0]["finish_reason"] == "stop"
        assert "tool_calls" not in reply.json["choices"][0]["message"]


async def test_unusual_roles() -> None:
    client = make_client(ScriptedGenerator(answer=echo_prompt))
    user = {"role": "user", "content": "x"}
    replies = [
        await client.chat(messages=[{"role": r, "content": "y"}, user]) for r in ("developer", "system")
    ]
    assert [reply.status for reply in replies] == [200, 200]
    assert replies[0].json["usage"] == replies[1].json["usage"]


async def test_a_model_without_a_template_has_no_chat() -> None:
    client = make_client(models=[tiny_model(template=None)])
    assert (await client.chat()).json["error"]["param"] == "model"
    assert (await client.complete()).status == 200


async def test_long_prompts_are_tokenised_off_the_loop_and_answered() -> None:
    model = tiny_model(context_tokens=100_000)
    generator = ScriptedGenerator(answer=lambda request: list(request.prompt)[:1])
    reply = await make_client(generator, [model]).complete(prompt="word " * 5000)
    assert reply.status == 200
    assert list(generator.requests[0].prompt) == ids("word " * 5000)


# ---------------------------------------------------------------- sampling, logprobs, disaggregation


async def test_max_completion_tokens() -> None:
    choice = (await make_client().chat(max_completion_tokens=3)).json["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "Hello,")


@BOTH
async def test_max_tokens_one_text(endpoint: str) -> None:
    reply = await ask(make_client(), endpoint, max_tokens=1)
    assert text_of(reply, stream=False) == "Hel"
    assert reply.json["usage"]["completion_tokens"] == 1
    assert reply.json["choices"][0]["finish_reason"] == "length"


@BOTH
async def test_max_tokens_one_exact(endpoint: str) -> None:
    client = make_client()
    longer = (await ask(client, endpoint, stream=True)).text()
    reply = await ask(client, endpoint, stream=True, max_tokens=1, stream_options={"include_usage": True})
    assert longer.startswith(reply.text() or "?")
    assert reply.chunks[-1]["usage"]["completion_tokens"] == 1
    assert reply.reasons() == ["length"]


async def test_salt_isolates() -> None:
    """The salt reaches the generator as its own field, never as part of the prompt."""
    generator = ScriptedGenerator()
    client = make_client(generator)
    for salt in ("a", "b", None):
        await client.complete(cache_salt=salt)
    assert [request.cache_salt for request in generator.requests] == ["a", "b", ""]
    assert len({request.prompt.tobytes() for request in generator.requests}) == 1


@STREAM
async def test_a_stop_token_is_no_part_of_the_text(stream: bool) -> None:
    """The engine ends on it and counts it; so with EOS, also one the tokenizer does not call special."""
    answer = ids("one two")
    generator = ScriptedGenerator(answer=lambda request: answer)
    eos = tiny_model()
    model = dataclasses.replace(eos, eos_ids=frozenset(answer[-1:]))
    shown = "one two".removesuffix(eos.tokenizer.decode(answer[-1:]))
    by_eos = await make_client(generator, [model]).chat(stream=stream)
    by_id = await make_client(generator).chat(stream=stream, stop_token_ids=answer[-1:])
    ignored = await make_client(generator, [model]).chat(stream=stream, ignore_eos=True)
    assert [text_of(reply, stream) for reply in (by_eos, by_id, ignored)] == [shown, shown, "one two"]
    if not stream:
        assert by_id.json["usage"]["completion_tokens"] == len(answer)


@STREAM
async def test_stop_on_first_token(stream: bool) -> None:
    first = "Hel"
    assert ids(first) == ids("Hello, world!")[:1]
    reply = await make_client().chat(stream=stream, stop=[first])
    assert text_of(reply, stream) == ""
    assert (reply.reasons() if stream else [reply.json["choices"][0]["finish_reason"]]) == ["stop"]


async def test_cached_within_prompt() -> None:
    reply = await make_client(ScriptedGenerator(cached_tokens=2)).complete(prompt="one two three")
    usage = reply.json["usage"]
    assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] == 2 <= usage["prompt_tokens"]


@BOTH
async def test_logprobs_off_means_none(endpoint: str) -> None:
    client = make_client()
    assert (await ask(client, endpoint)).json["choices"][0]["logprobs"] is None
    streamed = await ask(client, endpoint, stream=True)
    assert all(chunk["choices"][0]["logprobs"] is None for chunk in streamed.chunks)


async def test_logprobs_cover_first_token() -> None:
    reply = (await make_client().chat(logprobs=True, top_logprobs=2)).json
    entries = reply["choices"][0]["logprobs"]["content"]
    assert len(entries) == reply["usage"]["completion_tokens"]
    assert reply["choices"][0]["message"]["content"].startswith(entries[0]["token"])
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


@pytest.mark.parametrize("per_step", [1, 2, 3, 50])
async def test_logprobs_stream_complete(per_step: int) -> None:
    """Also with more than one token a chunk, half characters, and a stop string in the middle."""
    answer = ids("one \U0001f389 two three")
    client = make_client(ScriptedGenerator(answer=lambda request: answer, per_step=per_step))
    for stop in (None, ["two"]):
        reply = await client.chat(
            stream=True, logprobs=True, stop=stop, stream_options={"include_usage": True}
        )
        *chunks, usage = reply.chunks
        entries = [
            e for c in chunks if c["choices"][0]["logprobs"] for e in c["choices"][0]["logprobs"]["content"]
        ]
        assert len(entries) == usage["usage"]["completion_tokens"]
        if stop is None:
            assert b"".join(bytes(e["bytes"]) for e in entries).decode() == reply.text()


async def test_logprobs_finish_reason_kept() -> None:
    reply = await make_client().chat(stream=True, logprobs=True, max_tokens=4)
    assert reply.reasons() == ["length"]


async def test_logprobs_of_completions() -> None:
    reply = (await make_client().complete(logprobs=3)).json
    logprobs = reply["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == reply["choices"][0]["text"]
    assert logprobs["text_offset"][:3] == [0, 3, 5]
    assert all(len(top) == 3 for top in logprobs["top_logprobs"])


async def test_logprobs_bytes_are_utf8() -> None:
    text = "日本 \U0001f389"
    client = make_client(ScriptedGenerator(answer=lambda request: ids(text)))
    entries = (await client.chat(logprobs=True)).json["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == text


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
