"""The official client library against the API on a real server and socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import pytest
import uvicorn

from serving.errors import WorkerLost
from tests.scripted import ScriptedGenerator, make_client
from tests.tiny_tokenizer import ids


@asynccontextmanager
async def served(generator: ScriptedGenerator) -> AsyncIterator[openai.AsyncOpenAI]:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(make_client(generator).api, log_level="error", lifespan="on")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    port = listener.getsockname()[1]
    client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    try:
        async with asyncio.timeout(20), client:
            yield client
    finally:
        server.should_exit = True
        await serving


async def test_sdk_reads_stream() -> None:
    text = "one \U0001f389 two three"
    async with served(ScriptedGenerator(answer=lambda request: ids(text))) as client:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Hello"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
        assert "".join(choice.delta.content or "" for choice in choices) == text
        assert choices[-1].finish_reason == "stop"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == len(ids(text))

        whole = await client.completions.create(
            model="tiny", prompt=["one", "two"], logprobs=1, stop=["three"]
        )
        assert [choice.text for choice in whole.choices] == ["one \U0001f389 two "] * 2
        assert [model.id async for model in client.models.list()] == ["tiny"]


async def test_sdk_raises_what_the_server_says() -> None:
    async with served(ScriptedGenerator(error=WorkerLost("the worker is gone"))) as client:
        with pytest.raises(openai.NotFoundError, match="nobody"):
            await client.completions.create(model="nobody", prompt="x")
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="tiny", prompt="x", n=3)
        assert caught.value.param == "n"
        stream = await client.completions.create(model="tiny", prompt="x", stream=True)
        with pytest.raises(openai.APIError, match="the worker was lost"):
            async for _ in stream:
                pass


async def test_a_client_that_leaves_a_real_server_cancels() -> None:
    generator = ScriptedGenerator(hang=True)
    async with served(generator) as client:
        stream = await client.completions.create(model="tiny", prompt="x", stream=True)
        async for _ in stream:
            break
        await stream.close()
        while not generator.tickets[0].cancelled:
            await asyncio.sleep(0.005)
