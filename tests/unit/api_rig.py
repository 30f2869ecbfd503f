"""Both endpoints of the HTTP layer, whole and streamed: how a test asks, and the text of what comes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scripted import Client

BOTH = pytest.mark.parametrize("endpoint", ["chat", "complete"])
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


async def ask(client: Client, endpoint: str, **fields: Any) -> Any:
    return await (client.chat(**fields) if endpoint == "chat" else client.complete(**fields))


def text_of(reply: Any, stream: bool, index: int = 0) -> str:
    if stream:
        return str(reply.text(index))
    choice = reply.json["choices"][index]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])
