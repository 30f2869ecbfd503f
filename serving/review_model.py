"""Rules of `check` on model and GPU: how heads and layers divide, and what the GPU can compute with."""

from __future__ import annotations

from collections.abc import Iterator

from serving.config_review import Finding, Rule, Subject
from serving.errors import ConfigError
from serving.manifest import model_digest
from serving.model_shape import ModelShape
from serving.quantization import KV_ARCHITECTURES, find_quantization
from serving.review_lengths import context_tokens
from serving.worker_spec import find_weights, kv_dtype_of, longest_prompt, placement_of

KV_16_BIT_FROM_TOKENS = 8192  # beyond it quantised KV loses quality; practitioners keep it at 16 bits there
GPUS_OF_A_HOST = 8


def _division(subject: Subject) -> Iterator[Finding]:
    shape = subject.shape
    if shape is None:
        return
    places = {placement_of(subject.variant, role): role for role in reversed(subject.roles)}
    for place, role in places.items():
        tensor, where = place.tensor, f"{role} parallel.tensor"
        fitting = ", ".join(str(n) for n in range(1, GPUS_OF_A_HOST + 1) if _divides(shape, n))
        if shape.heads % tensor:
            yield subject.error(where, f"{tensor} does not divide {shape.heads} heads", f"one of {fitting}")
        elif shape.latent is None and shape.kv_heads % tensor and tensor % shape.kv_heads:
            yield subject.error(
                where, f"{tensor} and {shape.kv_heads} KV heads do not divide", f"one of {fitting}"
            )
        elif shape.mlp_width % tensor:
            yield subject.error(
                where, f"{tensor} does not divide the MLP's width of {shape.mlp_width}", f"one of {fitting}"
            )
        elif shape.latent is None and tensor > shape.kv_heads and not place.attention_dp:
            yield subject.warning(
                where,
                f"{tensor} GPUs, {shape.kv_heads} KV heads: each is held {tensor // shape.kv_heads} times",
                f"tensor: {shape.kv_heads}, and more replicas or pipeline stages",
            )
        elif shape.latent is not None and tensor > 1 and not place.attention_dp:
            yield subject.warning(
                where,
                f"latent attention does not divide: each of {tensor} GPUs holds the whole KV",
                "engine.trtllm.extra: {enable_attention_dp: true}",
            )
        if tensor > GPUS_OF_A_HOST:
            yield subject.warning(
                where,
                f"{tensor} GPUs are more than a host has: every layer would cross the network",
                f"tensor: {GPUS_OF_A_HOST} or less, and pipeline across hosts",
            )
        if shape.layers % place.pipeline:
            yield subject.warning(
                f"{role} parallel.pipeline",
                f"{place.pipeline} does not divide {shape.layers} layers: some stages wait for others",
                "a number that does",
            )


def _divides(shape: ModelShape, tensor: int) -> bool:
    kv = shape.latent is not None or not (shape.kv_heads % tensor and tensor % shape.kv_heads)
    return kv and not shape.heads % tensor and not shape.mlp_width % tensor


def _weights(subject: Subject) -> Iterator[Finding]:
    variant, shape, gpu = subject.variant, subject.shape, subject.gpu
    if variant.engine.kind != "tensorrt_llm":
        return
    try:
        required = find_quantization(variant.requires.quantization, "requires.quantization")
    except ConfigError as error:
        yield subject.error("requires.quantization", error.message, "a name of that list")
        return
    said = shape.quantization if shape is not None else None
    if variant.requires.quantization is not None and said is not None:
        wanted = required.name if required else "none"
        if said != wanted:
            yield subject.error(
                "requires.quantization",
                f"{wanted}, and the checkpoint is {said}: no worker would start",
                f"{said}, or other weights",
            )
    try:
        used = find_quantization(said, "the checkpoint's quantisation") if said is not None else required
    except ConfigError as error:
        yield subject.warning("weights", error.message, "without it memory and GPU are not looked at")
        return
    if used is None or gpu is None:
        return
    if used.architectures is None:
        yield subject.warning(
            "weights",
            f"{used.name} is not in TensorRT-LLM's support matrix for {gpu.architecture.value}",
            "try it before you rely on it, or quantise otherwise",
        )
    elif gpu.architecture not in used.architectures:
        others = ", ".join(sorted(a.value for a in used.architectures))
        yield subject.error(
            "weights",
            f"{used.name} does not run on {gpu.name} ({gpu.architecture.value}); it does on {others}",
            _instead(gpu.architecture.value),
        )


def _instead(architecture: str) -> str:
    if architecture == "Ampere":
        return "16 bits, W4A16_AWQ or W4A16_GPTQ weights"
    return "FP8 or 16-bit weights"


def _kv(subject: Subject) -> Iterator[Finding]:
    variant, shape, gpu = subject.variant, subject.shape, subject.gpu
    if variant.engine.kind != "tensorrt_llm":
        return
    setting = "engine.trtllm.kv_dtype"
    kv: str = kv_dtype_of(variant, shape) if shape is not None else variant.engine.trtllm.kv_dtype
    allowed = KV_ARCHITECTURES.get(kv)
    if gpu is not None and allowed is not None and gpu.architecture not in allowed:
        others = ", ".join(sorted(a.value for a in allowed))
        yield subject.error(
            setting, f"{kv} KV does not run on {gpu.name}; it does on {others}", "fp8, or auto (16 bits)"
        )
    context = context_tokens(subject)
    if allowed is None or context is None:
        return
    longest = longest_prompt(variant, context)
    if longest > KV_16_BIT_FROM_TOKENS:
        yield subject.warning(
            setting,
            f"{kv} KV with prompts up to {longest:,} tokens; it loses quality beyond about 8k",
            f"bfloat16, or a variant of its own for them: prompt_tokens.max: {KV_16_BIT_FROM_TOKENS} here",
        )


def _digest(subject: Subject) -> Iterator[Finding]:
    pinned = subject.variant.requires.weights_digest
    directory = find_weights(subject.variant.weights)
    if pinned is None or directory is None:
        return
    found = model_digest(directory)
    if found != pinned:
        yield subject.error(
            "requires.weights_digest",
            f"{pinned}, and the weights here are {found}",
            f"the right weights, or weights_digest: {found}",
        )


MODEL_RULES: tuple[Rule, ...] = (_division, _weights, _kv, _digest)
