"""Bodies of OpenAI requests: parsed, or the error they are refused with."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serving.errors import RequestError
from serving.openai import parse_chat, parse_completion

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
