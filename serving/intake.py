"""From a checked body to generation requests: render, tokenise, check that it fits.

Tokenising runs inline for short prompts and in a thread for long ones. Measured with SmolLM2's tokenizer:
60 characters take 12 us, 1,000 take 160 us, 4,000 take 620 us, and a hop to a thread costs 35 us; so up to
INLINE_CHARS the loop is held for at most about 0.3 ms and the hop is saved.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from serving.api_keys import Tenant
from serving.chat import ChatTemplate
from serving.engine.base import TOKEN_TYPECODE
from serving.errors import InvalidRequest
from serving.generation import GenerationRequest
from serving.messages import TextPart, template_messages
from serving.openai import (
    ChatBody,
    CompletionBody,
    check_prompt_fits,
    prompt_field,
    sampling_params,
)
from serving.responder import Piece
from serving.served_model import ServedModel

INLINE_CHARS = 2000
_CHARS_PER_MESSAGE = 100  # what rendering one message costs, in characters of tokenising
_THREADS = 2

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RequestHead:
    """What the HTTP headers say of a request."""

    request_id: str
    session: str | None = None
    timeout_ms: float | None = None
    tenant: Tenant | None = None


class Intake:
    """Owns the tokenising threads; `close` ends them."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenise")

    async def chat(self, body: ChatBody, model: ServedModel, head: RequestHead) -> list[Piece]:
        """One piece; raises RequestError."""
        template = model.chat
        if template is None:
            raise InvalidRequest(
                f"model {model.name!r} has no chat template; use /v1/completions", param="model"
            )
        # A message is a token at least: a flood of empty ones is refused before it is rendered.
        check_prompt_fits(len(body.messages), model.context_tokens, param="messages", exact=False)
        weight = len(body.messages) * _CHARS_PER_MESSAGE + sum(_length(m.content) for m in body.messages)
        prompt = await self._run(weight, lambda: _encode_chat(body, model, template))
        return [_piece(body, model, head, prompt, echo="")]

    async def completion(self, body: CompletionBody, model: ServedModel, head: RequestHead) -> list[Piece]:
        """A piece per prompt, in order; raises RequestError."""
        prompts = body.prompts
        for given in prompts:
            if not isinstance(given, str):
                check_prompt_fits(len(given), model.context_tokens, param="prompt")
        weight = sum(len(p) for p in prompts if isinstance(p, str))
        encoded = await self._run(weight, lambda: [_encode_prompt(prompt, model) for prompt in prompts])
        pieces = []
        for i, (given, prompt) in enumerate(zip(prompts, encoded, strict=True)):
            echo = ""
            if body.echo:
                echo = given if isinstance(given, str) else model.tokenizer.decode(given)
            one = head if len(prompts) == 1 else replace(head, request_id=f"{head.request_id}-{i}")
            pieces.append(_piece(body, model, one, prompt, echo))
        return pieces

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, weight: int, work: Callable[[], _T]) -> _T:
        if weight <= INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _encode_chat(body: ChatBody, model: ServedModel, template: ChatTemplate) -> array[int]:
    text = template.render(template_messages(body.messages), body.chat_template_kwargs)
    # the template writes the special tokens itself
    return _encode(text, model, "messages", add_special_tokens=False)


def _encode_prompt(prompt: str | Sequence[int], model: ServedModel) -> array[int]:
    if isinstance(prompt, str):
        return _encode(prompt, model, "prompt", add_special_tokens=True)
    if max(prompt) >= model.tokenizer.vocab_size:
        raise InvalidRequest(
            f"prompt has a token id that is not below {model.tokenizer.vocab_size}", param="prompt"
        )
    return array(TOKEN_TYPECODE, prompt)


def _encode(text: str, model: ServedModel, field: str, *, add_special_tokens: bool) -> array[int]:
    # A text far beyond the context is refused before minutes of tokenising.
    at_least = model.tokenizer.fewest_tokens(text)
    check_prompt_fits(at_least, model.context_tokens, param=field, exact=False)
    return model.tokenizer.encode(text, add_special_tokens=add_special_tokens)


def _piece(
    body: ChatBody | CompletionBody, model: ServedModel, head: RequestHead, prompt: array[int], echo: str
) -> Piece:
    if not prompt:
        raise InvalidRequest("the prompt has no token", param=prompt_field(body))
    if body.max_tokens == 0:  # echo only
        check_prompt_fits(len(prompt), model.context_tokens, param=prompt_field(body))
        return Piece(len(prompt), None, echo)
    slo_class = _slo_class(body.service_tier, model)
    request = GenerationRequest(
        request_id=head.request_id,
        model=model.base or model.name,
        prompt=prompt,
        params=sampling_params(body, model, len(prompt)),
        cache_salt=body.cache_salt or (head.tenant.salt if head.tenant is not None else ""),
        session=head.session,
        timeout_ms=head.timeout_ms,
        adapter=model.adapter,
        slo_class=slo_class,
        priority=0 if slo_class is None else model.classes[slo_class].priority,
        tenant=head.tenant.name if head.tenant is not None else None,
    )
    hidden = frozenset(request.params.stop_token_ids)
    if not request.params.ignore_eos:
        hidden |= model.eos_ids
    # special tokens have no text anyway
    return Piece(len(prompt), request, echo, body.stop_strings, hidden - model.tokenizer.special_ids)


def _length(content: str | list[TextPart] | None) -> int:
    if isinstance(content, str):
        return len(content)
    return sum(len(part.text or "") for part in content or ())


def _slo_class(tier: str | None, model: ServedModel) -> str | None:
    """Where no classes are configured any tier is taken for none, as OpenAI's clients may send theirs."""
    if tier in {None, "auto", "default"} or not model.classes:
        return None
    if tier not in model.classes:
        allowed = ", ".join(("auto", "default", *sorted(model.classes)))
        raise InvalidRequest(f"service_tier = {tier!r}; allowed: {allowed}", param="service_tier")
    return tier
