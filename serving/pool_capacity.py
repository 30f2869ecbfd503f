"""What each pool of a configuration holds: settings, shape, GPU and traffic brought together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from serving.capacity import GIB, Capacity, Traffic, plan, plan_pool
from serving.checkpoint import verify_checkpoint
from serving.config import Variant
from serving.errors import ConfigError
from serving.gpu_catalog import GpuType, find_gpu
from serving.model_shape import ModelShape, read_shape
from serving.preflight import Plan
from serving.sim_profile import load_profile
from serving.worker_spec import (
    context_of,
    find_weights,
    longest_prompt,
    on_gpu,
    placement_of,
    precision_of,
    sim_limits,
    worker_spec,
)

PROMPT_TOKENS, OUTPUT_TOKENS = 4096, 512  # p99 of a chat's turns, where nothing better is known


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says beside the configuration; None: not given."""

    gpu: str | None = None
    shapes: Mapping[str, Path] | None = None  # by model name; "" for all models
    concurrency: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    headroom: float = 0.2
    reserve_gib: float | None = None


@dataclass(frozen=True, slots=True)
class PoolCapacity:
    """One pool, with what its numbers rest on."""

    model: str
    variant: str
    role: str
    replicas: int
    gpu: str | None
    gpus: int  # of each worker
    weights: str  # precision, in words
    kv: str
    traffic: Traffic
    capacity: Capacity

    @property
    def workers_needed(self) -> int | None:
        """For `--concurrency`; None where no number of them would do."""
        total = self.traffic.concurrency
        if total is None:
            return self.replicas
        return math.ceil(total / self.capacity.holds) if self.capacity.holds else None


def parse_shapes(given: Sequence[str]) -> dict[str, Path]:
    """`FILE` for all models, `MODEL=FILE` for one."""
    shapes = {}
    for text in given:
        model, found, file = text.partition("=")
        shapes[model if found else ""] = Path(file if found else text)
    return shapes


def shape_of(model: str, variant: Variant, options: Options) -> ModelShape:
    """Raises ConfigError when no config.json is at hand, or when it is none."""
    shapes = options.shapes or {}
    given = shapes.get(model) or shapes.get("")
    found = given or find_weights(variant.weights)
    if found is None:
        raise ConfigError(
            f"{model}/{variant.name}: weights {variant.weights!r} are not on this machine; "
            "give its config.json with --shape FILE"
        )
    shape = read_shape(found)
    verify_checkpoint(found, shape)
    return shape


def gpu_of(variant: Variant, options: Options) -> GpuType | None:
    """`--gpu`, else the type that the variant requires. Raises ConfigError for one that nobody knows."""
    if not on_gpu(variant):
        return None
    if options.gpu is not None:
        return find_gpu(options.gpu)
    if variant.requires.gpu is not None:
        return find_gpu(variant.requires.gpu, "requires.gpu")
    raise ConfigError(f"variant {variant.name!r} runs on GPUs: set requires.gpu, or give --gpu NAME")


def capacities(plan_: Plan, options: Options) -> Iterator[PoolCapacity]:
    """Every decode pool; and every prefill pool that is laid out otherwise."""
    for application in plan_.applications:
        for model in application.models:
            for variant in model.variants:
                yield from _of_variant(model.name, variant, options)


def _of_variant(model: str, variant: Variant, options: Options) -> Iterator[PoolCapacity]:
    decode = _of_pool(model, variant, "decode", options)
    yield decode
    if variant.prefill.replicas and placement_of(variant, "prefill") != placement_of(variant, "decode"):
        yield _of_pool(model, variant, "prefill", options)


def _of_pool(model: str, variant: Variant, role: str, options: Options) -> PoolCapacity:
    pool = variant.prefill if role == "prefill" else variant.decode
    if variant.engine.kind == "sim":
        kv, limits = sim_limits(variant, load_profile(variant.engine.profile))
        traffic = traffic_of(variant, role, limits.context_tokens, options)
        held = plan_pool(kv, variant.engine.kv_bytes, limits, traffic)
        return PoolCapacity(
            model, variant.name, role, pool.replicas, None, 0, "none, simulated", "made up", traffic, held
        )
    shape = shape_of(model, variant, options)
    gpu = gpu_of(variant, options)
    traffic = traffic_of(variant, role, context_of(variant, shape), options)
    reserve = None if options.reserve_gib is None else math.ceil(options.reserve_gib * GIB)
    spec = worker_spec(variant, role, shape, gpu, reserve)
    precision = precision_of(variant, shape)
    return PoolCapacity(
        model=model,
        variant=variant.name,
        role=role,
        replicas=pool.replicas,
        gpu=gpu.name if gpu else None,
        gpus=spec.place.gpus if on_gpu(variant) else 0,
        weights=precision.weights.name if precision.weights else precision.dtype,
        kv=precision.kv,
        traffic=traffic,
        capacity=plan(spec, traffic),
    )


def traffic_of(variant: Variant, role: str, context_tokens: int, options: Options) -> Traffic:
    """Prompts of PROMPT_TOKENS; of all that the variant takes when it is for longer ones or takes less."""
    output = options.output_tokens
    if output is None:
        output = max(1, min(OUTPUT_TOKENS, context_tokens // 4))
    prompt = options.prompt_tokens
    if prompt is None:
        prompt = longest_prompt(variant, context_tokens)
        if variant.prompt_tokens.min <= PROMPT_TOKENS:
            prompt = min(prompt, PROMPT_TOKENS)
        prompt = max(1, min(prompt, context_tokens - output))
    if role == "prefill":
        output = 1
    pool = variant.prefill if role == "prefill" else variant.decode
    concurrency = options.concurrency if role == "decode" else None
    return Traffic(prompt, output, concurrency, options.headroom, max(1, pool.replicas))
