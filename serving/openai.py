"""What clients may send to /v1/chat/completions and /v1/completions: typed bodies, and every rule on them.

`parse_chat` and `parse_completion` turn bytes into a checked body; `sampling_params` adds what needs the
model (vocabulary, context, capabilities). Every fault of the client ends here as an error that names its
`param`; messages are short and never repeat the input. Unknown fields are ignored, because SDKs send fields
of their own; fields that would change the answer and that we do not do are refused.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from serving.engine.base import SamplingParams
from serving.errors import ContextLengthExceeded, InvalidRequest, UnsupportedFeature
from serving.guided import read_guided
from serving.messages import MessageBody, check_messages
from serving.served_model import ServedModel

DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI's own default
MAX_PROMPTS = 256
MAX_STOP_STRINGS = 4
MAX_STOP_CHARS = 1024
_MAX_MESSAGE = 300  # characters of an error message
_U64 = (1 << 64) - 1

TokenId = Annotated[int, Meta(ge=0, lt=1 << 32)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]


class StreamOptions(Struct):
    include_usage: bool | None = None


class SamplingBody(Struct, kw_only=True):
    """Fields that both endpoints have."""

    model: Annotated[str, Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 32)] | None = None  # -1 and 0: off
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: (
        Annotated[dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] | None
    ) = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    service_tier: Annotated[str, Meta(max_length=64)] | None = None  # a class of the model's `slo`

    # What the answer is bound to: serving/guided.py.
    response_format: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None

    # Refused unless they ask for what we do anyway (_NEUTRAL).
    best_of: Any = None
    suffix: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    prompt_logprobs: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    truncate_prompt_tokens: Any = None
    include_stop_str_in_output: Any = None
    skip_special_tokens: Any = None

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatBody(SamplingBody, kw_only=True):
    messages: Annotated[list[MessageBody], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=0)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    prediction: Any = None
    audio: Any = None
    modalities: Any = None
    web_search_options: Any = None
    echo: Any = None
    chat_template: Any = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None


class CompletionBody(SamplingBody, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts one by one: each a text or token ids. Checked by `parse_completion`."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]


# Values of refused fields that change nothing, beside None.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "prompt_logprobs": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "truncate_prompt_tokens": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
}
_NEUTRAL_IN_CHAT: dict[str, tuple[Any, ...]] = {
    **_NEUTRAL,
    "tools": ([],),
    "tool_choice": ("none", "auto"),  # without tools both mean: no call
    "functions": ([],),
    "function_call": ("none", "auto"),
    "prediction": (),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "echo": (False,),
    "chat_template": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}

_chat_decoder = msgspec.json.Decoder(ChatBody)
_completion_decoder = msgspec.json.Decoder(CompletionBody)
_Body = TypeVar("_Body", bound=SamplingBody)


def parse_chat(data: bytes) -> ChatBody:
    """Raises InvalidRequest, UnsupportedFeature."""
    body = _decode(_chat_decoder, data)
    if body.tool_choice == "none":  # the tools are there but may not be called
        body.tools = None
    _refuse_unsupported(body, _NEUTRAL_IN_CHAT)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    if body.max_completion_tokens is not None:
        body.max_tokens = body.max_completion_tokens
    if body.max_tokens == 0:
        given = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        raise InvalidRequest(f"{given} must be at least 1", param=given)
    check_messages(body.messages)
    return body


def parse_completion(data: bytes) -> CompletionBody:
    """Raises InvalidRequest, UnsupportedFeature."""
    body = _decode(_completion_decoder, data)
    _refuse_unsupported(body, _NEUTRAL)
    if body.echo and body.logprobs is not None:
        raise UnsupportedFeature("echo together with logprobs is not supported", param="logprobs")
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest("max_tokens must be at least 1 (0 only with echo)", param="max_tokens")
    if isinstance(body.prompt, list):
        kinds = {type(entry) for entry in body.prompt}
        if len(kinds) > 1:
            raise InvalidRequest(
                "prompt must be a string, a list of strings, a list of token ids, or a list of such lists",
                param="prompt",
            )
    prompts = body.prompts
    if not prompts or not all(prompts):
        raise InvalidRequest("prompt must hold at least one token, in each of its entries", param="prompt")
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt has {len(prompts)} entries; at most {MAX_PROMPTS}", param="prompt")
    return body


def sampling_params(body: ChatBody | CompletionBody, model: ServedModel, n_prompt: int) -> SamplingParams:
    """How to answer a prompt of `n_prompt` tokens.

    Raises ContextLengthExceeded, InvalidRequest, UnsupportedFeature. Not for `max_tokens` 0 (echo only).
    """
    _check_vocabulary(body, model)
    _check_capabilities(body, model)
    max_tokens = _max_tokens(body, model.context_tokens, n_prompt)
    min_tokens = body.min_tokens or 0
    guided = read_guided(body)
    if min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens is beyond max_tokens ({max_tokens})", param="min_tokens")
    return SamplingParams(
        max_tokens=max_tokens,
        seed=secrets.randbits(64) if body.seed is None else body.seed & _U64,
        temperature=_or(body.temperature, 1.0),
        top_p=_or(body.top_p, 1.0),
        top_k=body.top_k if body.top_k is not None and body.top_k > 0 else None,
        min_p=_or(body.min_p, 0.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        logit_bias=body.logit_bias or None,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        min_tokens=min_tokens,
        logprobs=wanted_logprobs(body),
        guided=None if guided is None else guided[1],
    )


def wanted_logprobs(body: ChatBody | CompletionBody) -> int | None:
    """How many alternatives beside the chosen token, None when no logprobs were asked for."""
    if isinstance(body, ChatBody):
        return (body.top_logprobs or 0) if body.logprobs else None
    return body.logprobs


def check_prompt_fits(n_prompt: int, context_tokens: int, *, param: str, exact: bool = True) -> None:
    """Raises ContextLengthExceeded when no room is left for a single new token."""
    if n_prompt >= context_tokens:
        size = f"{n_prompt}" if exact else f"at least {n_prompt}"
        raise ContextLengthExceeded(
            f"the prompt has {size} tokens; this model's context is {context_tokens} tokens, "
            "prompt and answer together",
            param=param,
        )


def prompt_field(body: ChatBody | CompletionBody) -> str:
    """The field that holds the prompt, for errors."""
    return "messages" if isinstance(body, ChatBody) else "prompt"


def _max_tokens(body: ChatBody | CompletionBody, context_tokens: int, n_prompt: int) -> int:
    check_prompt_fits(n_prompt, context_tokens, param=prompt_field(body))
    room = context_tokens - n_prompt
    if body.max_tokens is None:
        return room if isinstance(body, ChatBody) else min(room, DEFAULT_COMPLETION_TOKENS)
    if body.max_tokens > room:
        raise ContextLengthExceeded(
            f"{n_prompt} prompt tokens + max_tokens {_shown(body.max_tokens)} = "
            f"{_shown(n_prompt + body.max_tokens)} tokens; this model's context is {context_tokens} tokens",
            param="max_tokens",
        )
    return body.max_tokens


def _shown(n: int) -> str:
    return str(n) if n < 1 << 63 else "(more than 2^63)"


def _check_vocabulary(body: SamplingBody, model: ServedModel) -> None:
    size = model.tokenizer.vocab_size
    if body.logit_bias and max(body.logit_bias) >= size:
        raise InvalidRequest(f"logit_bias has a token id that is not below {size}", param="logit_bias")
    if body.stop_token_ids and max(body.stop_token_ids) >= size:
        raise InvalidRequest(f"stop_token_ids has an id that is not below {size}", param="stop_token_ids")


def _check_capabilities(body: ChatBody | CompletionBody, model: ServedModel) -> None:
    has = model.capabilities
    if wanted_logprobs(body) is not None and not has.logprobs:
        raise UnsupportedFeature("this model's engine gives no logprobs", param="logprobs")
    if body.logit_bias and not has.logit_bias:
        raise UnsupportedFeature("this model's engine has no logit_bias", param="logit_bias")
    guided = read_guided(body)
    if guided is not None and not has.guided:
        raise UnsupportedFeature("this model's engine cannot bind its answers", param=guided[0])
    if not has.penalties:
        neutral = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
        for field, off in neutral.items():
            if getattr(body, field) not in {None, off}:
                raise UnsupportedFeature(f"this model's engine has no {field}", param=field)


def _refuse_unsupported(body: SamplingBody, neutral: dict[str, tuple[Any, ...]]) -> None:
    if body.n is not None and body.n != 1:
        raise UnsupportedFeature("n must be 1: one answer a prompt", param="n")
    read_guided(body)  # whether this model's engine can is known later
    for field, harmless in neutral.items():
        value = getattr(body, field)
        if value is None or value in harmless:
            continue
        raise UnsupportedFeature(f"{field} is not supported", param=field)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


_AT = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"^Object missing required field `(?P<field>\w+)`")


def _decode(decoder: msgspec.json.Decoder[_Body], data: bytes) -> _Body:
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is no valid JSON: {str(error)[:_MAX_MESSAGE]}") from None


def _explain(text: str) -> InvalidRequest:
    found = _AT.search(text)
    path = found["path"] if found else ""
    what = _AT.sub("", text)
    missing = _MISSING.match(what)
    if missing:
        path = f"{path}.{missing['field']}" if path else missing["field"]
        return InvalidRequest(f"{path} is missing", param=path)
    if not path.startswith("messages"):
        path = re.split(r"[.\[]", path)[0]
    message = f"{path or 'body'}: {what[:1].lower()}{what[1:]}"
    return InvalidRequest(message[:_MAX_MESSAGE], param=path or None)
