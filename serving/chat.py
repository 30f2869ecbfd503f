"""Chat messages to token ids: the model's own template, rendered and tokenised once.

The template is run as transformers runs it (same sandbox, same filters and globals; a test compares the
two), but without importing transformers. Templates come with the weights and may be wrong or hostile:
whatever they raise becomes a 400 with the template's own reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from serving.errors import InvalidRequest, StartError

_MAX_REASON = 200  # characters of a template's reason that are passed on

ChatMessage = dict[str, Any]  # role, content (always a string), tool_calls, tool_call_id, name


class ChatTemplate:
    """One compiled template. `render` may be called from any thread."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        """`special_tokens`: bos_token, eos_token ... as the template may name them.

        Raises StartError when the template does not compile.
        """
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise StartError(f"the chat template does not compile: {error}") from error
        self._special_tokens = special_tokens
        self._knows_developer = "developer" in source

    def render(self, messages: Sequence[ChatMessage], variables: dict[str, Any] | None = None) -> str:
        """The prompt that asks for the assistant's next turn; raises InvalidRequest naming `messages`.

        `variables` are further values for the template (`chat_template_kwargs`).
        """
        try:
            return self._template.render(
                **{
                    "tools": None,
                    "documents": None,
                    **self._special_tokens,
                    **(variables or {}),
                    "messages": [self._known_role(message) for message in messages],
                    "add_generation_prompt": True,
                }
            )
        except _TemplateRefusal as error:
            reason = str(error)[:_MAX_REASON]
            raise InvalidRequest(f"the model's chat template refused: {reason}", param="messages") from None
        except Exception as error:
            # A template can raise anything, with the client's values in it: only the kind is passed on.
            raise InvalidRequest(
                f"the model's chat template cannot render these messages ({type(error).__name__})",
                param="messages",
            ) from None

    def _known_role(self, message: ChatMessage) -> ChatMessage:
        if message["role"] == "developer" and not self._knows_developer:
            return {**message, "role": "system"}
        return message


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` ... `{% endgeneration %}` marks what to train on; here it is just text."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own filter this does not escape HTML characters."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _TemplateRefusal(Exception):
    """The template said no, in its own words (`raise_exception`)."""


def _raise_exception(message: str) -> None:
    raise _TemplateRefusal(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
