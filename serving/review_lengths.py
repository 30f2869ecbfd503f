"""Rules of `check` on lengths: prompts against contexts, steps and transfer buffers."""

from __future__ import annotations

from collections.abc import Iterator

from serving.config_review import Finding, Rule, Subject
from serving.errors import ConfigError
from serving.sim_profile import load_profile
from serving.worker_spec import context_of, longest_prompt


def context_tokens(subject: Subject) -> int | None:
    """Of a sequence; None when that is not known here."""
    variant = subject.variant
    if variant.engine.kind == "sim":
        try:
            return load_profile(variant.engine.profile).context_tokens
        except ConfigError:
            return None
    if subject.shape is not None:
        return context_of(variant, subject.shape)
    return variant.engine.trtllm.max_seq_len if variant.engine.kind == "tensorrt_llm" else None


def _profile(subject: Subject) -> Iterator[Finding]:
    engine = subject.variant.engine
    if engine.kind == "sim":
        try:
            load_profile(engine.profile)
        except ConfigError as error:
            yield subject.error("engine.profile", error.message, "name one that is there")


def _context(subject: Subject) -> Iterator[Finding]:
    context = context_tokens(subject)
    if context is None:
        return
    variant, shape = subject.variant, subject.shape
    longest = variant.engine.trtllm.max_seq_len
    if variant.engine.kind == "tensorrt_llm" and longest and shape and longest > shape.context_tokens:
        yield subject.error(
            "engine.trtllm.max_seq_len",
            f"{longest:,} tokens; the model was made for {shape.context_tokens:,}",
            f"at most {shape.context_tokens}",
        )
    prompts = variant.prompt_tokens
    if prompts.min >= context:
        yield subject.error(
            "prompt_tokens.min",
            f"prompts of {prompts.min:,} tokens and more do not fit the context of {context:,}",
            "a smaller min, or a longer context",
        )
    elif prompts.max is not None and prompts.max >= context:
        yield subject.error(
            "prompt_tokens.max",
            f"{prompts.max:,} tokens leave no room for an answer in the context of {context:,}",
            f"below {context}, by as much as an answer may need",
        )


def _steps(subject: Subject) -> Iterator[Finding]:
    engine = subject.variant.engine
    per_step, setting = engine.chunk_tokens, "engine.chunk_tokens"
    if engine.kind == "tensorrt_llm":
        per_step, setting = engine.trtllm.max_num_tokens, "engine.trtllm.max_num_tokens"
    if per_step < engine.max_batch:
        yield subject.error(
            setting,
            f"{per_step} tokens a step; a batch of {engine.max_batch} needs one for each sequence",
            f"at least max_batch ({engine.max_batch})",
        )
    context = context_tokens(subject)
    if engine.kind != "tensorrt_llm" or context is None or engine.trtllm.chunked_prefill:
        return
    longest = longest_prompt(subject.variant, context)
    if per_step < longest:
        yield subject.error(
            setting,
            f"{per_step:,} tokens a step without chunked_prefill: prompts up to {longest:,} are refused",
            f"chunked_prefill: true, or max_num_tokens: {longest}, or prompt_tokens.max: {per_step}",
        )


def _buffers(subject: Subject) -> Iterator[Finding]:
    """The transceiver takes a prompt's KV through buffers of its own."""
    engine = subject.variant.engine
    context = context_tokens(subject)
    given = engine.trtllm.max_tokens_in_buffer
    buffer = given or context  # as the engine's adapter sets it
    if engine.kind != "tensorrt_llm" or engine.trtllm.transceiver_runtime != "CPP" or buffer is None:
        return
    setting = f"engine.trtllm.{'max_seq_len' if given is None else 'max_tokens_in_buffer'}"
    if buffer % engine.block_tokens:
        yield subject.error(
            setting,
            f"buffers of {buffer} tokens are no multiple of block_tokens ({engine.block_tokens}): "
            "the engine does not start",
            f"{_up(buffer, engine.block_tokens) if given else buffer - buffer % engine.block_tokens}",
        )
    if context is None:
        return
    needed = _up(context, engine.block_tokens)
    if buffer < context:
        yield subject.error(
            setting,
            f"{buffer:,} tokens; the KV of a prompt may have {context:,}",
            f"{needed}, or max_seq_len: {buffer}",
        )
    elif buffer >= 2 * needed:
        yield subject.warning(
            setting,
            f"{buffer:,} tokens of buffers for prompts up to {context:,}",
            f"{needed} is enough; the rest could be KV cache",
        )


def _up(tokens: int, block_tokens: int) -> int:
    """Rounded to whole blocks."""
    return -(-tokens // block_tokens) * block_tokens


LENGTH_RULES: tuple[Rule, ...] = (_profile, _context, _steps, _buffers)
