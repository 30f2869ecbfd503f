"""Messages of a chat as its template gets them: text in one piece, arguments as objects."""

from __future__ import annotations

from serving.messages import template_messages
from tests.unit.openai_bodies import HELLO, chat


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
