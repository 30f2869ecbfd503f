"""Chat messages as clients send them, and as templates get them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from serving.chat import ChatMessage
from serving.errors import InvalidRequest, UnsupportedFeature

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class TextPart(Struct):
    type: str
    text: str | None = None


class MessageBody(Struct):
    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


def check_messages(messages: Sequence[MessageBody]) -> None:
    """Raises InvalidRequest, UnsupportedFeature, naming the message."""
    for i, message in enumerate(messages):
        _check_message(message, f"messages[{i}]")
    if all(message.role == "assistant" for message in messages):
        raise InvalidRequest("messages must hold more than the assistant's own", param="messages")


def template_messages(messages: Sequence[MessageBody]) -> list[ChatMessage]:
    """The messages as the template gets them: content is always a string, absent keys are absent."""
    return [_template_message(message) for message in messages]


def _check_message(message: MessageBody, at: str) -> None:
    if message.role not in _ROLES:
        raise InvalidRequest(f"{at}.role must be one of {', '.join(_ROLES)}", param=f"{at}.role")
    content = message.content
    if content is None and (message.role != "assistant" or not message.tool_calls):
        raise InvalidRequest(f"{at}.content is missing", param=f"{at}.content")
    if isinstance(content, list):
        for part in content:
            if part.type != "text":
                raise UnsupportedFeature(
                    f"{at}.content: only parts of type text are supported", param=f"{at}.content"
                )
            if part.text is None:
                raise InvalidRequest(f"{at}.content: a part has no text", param=f"{at}.content")


def _template_message(message: MessageBody) -> ChatMessage:
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text or "" for part in content)
    out: ChatMessage = {"role": message.role, "content": content or ""}
    if message.tool_calls:
        out["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    for key in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, key)
        if value is not None:
            out[key] = value
    return out


def _template_call(call: dict[str, Any]) -> dict[str, Any]:
    """Clients send a call's arguments as JSON text; templates expect the object."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return (
        {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call
    )
