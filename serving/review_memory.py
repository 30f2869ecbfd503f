"""Rules of `check` on memory: what does not fit, what is too tight, what is never used."""

from __future__ import annotations

import math
from collections.abc import Iterator

from serving.capacity import GIB, Capacity, Memory, Traffic, memory_of, plan, plan_pool, step_floor_ms
from serving.config_review import Finding, Subject
from serving.errors import ConfigError
from serving.pool_capacity import Options, traffic_of
from serving.sim_profile import load_profile
from serving.worker_spec import context_of, sim_limits, weight_quantization, worker_spec

MOST_SHARE, AIM_SHARE, LEAST_SHARE = 0.92, 0.90, 0.50  # of a card; above the first one allocations fail


def _cards(subject: Subject) -> Iterator[Finding]:
    """Weights, KV and the rest on the memory of a GPU."""
    if subject.shape is None or subject.gpu is None:
        return
    seen = []
    for role in subject.roles:
        spec = worker_spec(subject.variant, role, subject.shape, subject.gpu)
        memory = memory_of(spec)
        if memory is None or spec.place in seen:
            continue
        seen.append(spec.place)
        trtllm = subject.variant.engine.kind == "tensorrt_llm"
        setting = "engine.trtllm.free_gpu_memory_fraction" if trtllm else "engine.kv_bytes"
        if memory.kv <= 0 or (memory.left < 0 and not trtllm):
            need = memory.weights / GIB
            yield subject.error(
                f"{role} parallel",
                f"does not fit {subject.gpu.name}: of {memory.card / GIB:.0f} GiB, {need:.0f} are weights",
                "more GPUs a worker (parallel.tensor), fewer bits a weight, or another GPU",
            )
        elif memory.used_share > MOST_SHARE:
            yield subject.warning(
                setting,
                f"{memory.used_share:.0%} of the memory of {subject.gpu.name} in use on {role} workers",
                _less(memory, trtllm),
            )
        elif memory.used_share < LEAST_SHARE:
            yield subject.warning(
                setting,
                f"{memory.used_share:.0%} of the memory of {subject.gpu.name} in use on {role} workers",
                "more KV cache, fewer GPUs a worker, or a smaller GPU",
            )


def _less(memory: Memory, trtllm: bool) -> str:
    """What brings the card to AIM_SHARE."""
    over = (memory.used_share - AIM_SHARE) * memory.card
    room = memory.kv - over
    if room <= 0:
        return "a shorter max_tokens_in_buffer or smaller steps: beside the KV there is too much already"
    if not trtllm:
        return f"kv_bytes: {math.floor(room)}"
    free = memory.card - memory.runtime - memory.weights - memory.activations
    return f"free_gpu_memory_fraction: {math.floor(100 * room / free) / 100:.2f}, about {AIM_SHARE:.0%}"


def _capacity(subject: Subject) -> Capacity | None:
    """Of a decode worker, with sequences as long as the variant is made for; None where that is unknown."""
    variant = subject.variant
    if variant.engine.kind == "sim":
        try:
            profile = load_profile(variant.engine.profile)
        except ConfigError:
            return None  # said elsewhere
        kv, limits = sim_limits(variant, profile)
        return plan_pool(kv, variant.engine.kv_bytes, limits, _traffic(subject, limits.context_tokens))
    if subject.shape is None or (variant.engine.kind == "tensorrt_llm" and subject.gpu is None):
        return None
    spec = worker_spec(variant, "decode", subject.shape, subject.gpu)
    return plan(spec, _traffic(subject, context_of(variant, subject.shape)))


def _traffic(subject: Subject, context_tokens: int) -> Traffic:
    return traffic_of(subject.variant, "decode", context_tokens, Options())


def _pool(subject: Subject) -> Iterator[Finding]:
    """The KV pool against sequences: the longest one, a full batch, and what no batch can fill."""
    held = _capacity(subject)
    if held is None or held.binds == "weights":
        return
    engine = subject.variant.engine
    context = (
        context_of(subject.variant, subject.shape)
        if subject.shape is not None
        else load_profile(engine.profile).context_tokens
    )
    fixed = engine.kind != "tensorrt_llm"
    setting = "engine.kv_bytes" if fixed else "engine.trtllm"
    one = held.kv.sequence_bytes(context)
    if held.kv_bytes < one:
        yield subject.error(
            setting,
            f"KV for {held.tokens:,} tokens; one sequence of the context has {context:,}",
            f"kv_bytes: {math.ceil(one)}"
            if fixed
            else f"max_seq_len: {held.tokens}, or more GPUs a worker",
        )
    elif held.kv_bytes > 2 * engine.max_batch * one:
        share = engine.max_batch * one / held.kv_bytes
        yield subject.warning(
            setting,
            f"a full batch of {engine.max_batch} uses at most {share:.0%} of the KV",
            "a larger max_batch, or less KV; what is never used only caches prefixes",
        )
    if not fixed and held.sequences_with_headroom < engine.max_batch / 2:
        yield subject.warning(
            "engine.max_batch",
            f"{engine.max_batch}, and the KV holds {held.sequences_with_headroom} sequences of "
            f"{held.sequence_tokens:,} tokens with 20 % head-room",
            f"max_batch: {max(1, held.sequences_with_headroom)}; or shorter prompts, or an fp8 KV",
        )


def _itl(subject: Subject) -> Iterator[Finding]:
    """A step reads its weights and KV: bandwidth is a floor no setting gets under."""
    held = _capacity(subject)
    target = subject.model.slo.itl_ms
    if held is None or held.step_floor_ms is None or subject.shape is None:
        return
    spec = worker_spec(subject.variant, "decode", subject.shape, subject.gpu)
    alone = step_floor_ms(spec, 1, held.sequence_tokens) or 0.0
    if alone > target:
        yield subject.warning(
            "slo.itl_ms",
            f"{target:g}, and reading the weights takes {alone:.1f} ms on {spec.place.gpus} GPUs",
            "more GPUs a worker, fewer bits a weight, or another target",
        )
    elif held.step_floor_ms > target:
        yield subject.warning(
            "slo.itl_ms",
            f"{target:g}, and a step of {held.holds} sequences takes {held.step_floor_ms:.1f} ms or more",
            "a smaller max_batch, or more GPUs a worker",
        )


def memory_rules(subject: Subject) -> Iterator[Finding]:
    """Nothing of weights whose size nobody here knows; review_model says that."""
    try:
        if subject.shape is not None:
            weight_quantization(subject.variant, subject.shape)
    except ConfigError:
        return
    for rule in (_cards, _pool, _itl):
        yield from rule(subject)
