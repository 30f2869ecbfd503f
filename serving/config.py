"""The application's settings: frozen, validated at load, every one with its unit in its name.

`load_config(args)` takes the `args` of the Serve YAML and raises ConfigError with one line that names
key, value and what is allowed. Nothing else reads settings, and no module reads the environment but for
the link key (serving/link_key.py). Settings that change live are owned by Control, not by this file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from kvrouter.policies.registry import POLICY_NAMES
from serving.config_errors import explain
from serving.errors import ConfigError

Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Milliseconds = Annotated[float, Meta(gt=0, le=86_400_000)]
Name = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")]


class Section(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all sections: unknown keys are errors."""


class SloTargets(Section, frozen=True):
    """Targets at `percentile`; TTFT may grow with the prompt's length."""

    ttft_ms: Milliseconds = 800
    ttft_ms_per_1k_tokens: Annotated[float, Meta(ge=0)] = 50
    itl_ms: Milliseconds = 40
    percentile: Annotated[float, Meta(gt=0, lt=100)] = 95


class SloClass(SloTargets, frozen=True):
    """What a request gets that names the class as its `service_tier`. `priority`: higher goes first."""

    priority: Annotated[int, Meta(ge=-8, le=8)] = 0


class Slo(SloTargets, frozen=True):
    """Of one model. `classes`: targets of their own for priority classes, by name; what a class leaves out
    has the usual default, not the model's value."""

    classes: dict[str, SloClass] = msgspec.field(default_factory=dict)


class SimProfile(Section, frozen=True):
    """Compute times and shape of a simulated model. A step takes
    `step_ms + batch * step_ms_per_sequence + prompt tokens * prefill_ms_per_token`."""

    step_ms: Annotated[float, Meta(ge=0)] = 0
    step_ms_per_sequence: Annotated[float, Meta(ge=0)] = 0
    prefill_ms_per_token: Annotated[float, Meta(ge=0)] = 0
    context_tokens: Positive = 8192
    kv_bytes_per_token: Annotated[int, Meta(ge=8)] = 64
    decode_ms: Annotated[float, Meta(ge=0)] = 0  # period of a paced decode: steps start on multiples of it


class TrtllmConfig(Section, frozen=True):
    """TensorRT-LLM alone. What is null is left to the engine's own default; docs/tensorrt-llm.md explains.

    `extra` goes to `LLM(...)` on top, once its keys were found in the installed version's signature;
    `env` is set in the engine's processes (TRTLLM_*, UCX_*).
    """

    dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    kv_dtype: Literal["auto", "float16", "bfloat16", "float32", "fp8", "nvfp4"] = "auto"
    free_gpu_memory_fraction: Annotated[float, Meta(gt=0, lt=1)] = 0.9
    host_cache_bytes: Count = 0
    max_num_tokens: Positive = 8192  # most tokens one step computes
    max_seq_len: Positive | None = None  # prompt and answer together; null: what the model was made for
    cuda_graph: bool = True
    overlap_scheduler: bool = True  # of decode workers; prefill workers run without it
    chunked_prefill: bool = True
    guided_backend: Literal["xgrammar", "llguidance"] | None = None
    lora: dict[str, str] = msgspec.field(default_factory=dict)  # adapter's name -> its directory
    prompt_retention: Annotated[int, Meta(ge=0, le=100)] | None = None  # priority of a prompt's blocks
    decode_retention: Annotated[int, Meta(ge=0, le=100)] | None = None  # and of generated ones
    orchestrator: Literal["mpi", "ray"] = "mpi"
    transceiver_runtime: Literal["CPP", "PYTHON"] = "CPP"  # both pools must run the same
    max_tokens_in_buffer: Positive | None = None  # null: the longest prompt there can be
    transfer_timeout_ms: Milliseconds = 60_000  # how long a prompt's KV waits for its reader, or moves
    transfer_ms_per_1k_tokens: Annotated[float, Meta(ge=0)] = 100  # long prompts may take so much more
    topology_pairs: list[str] = msgspec.field(default_factory=list)  # of unequal pools: "tp2pp1>tp1pp1"
    event_buffer: Positive = 100_000  # KV events kept until they are polled
    env: dict[str, str] = msgspec.field(default_factory=dict)
    extra: dict[str, Any] = msgspec.field(default_factory=dict)


class EngineConfig(Section, frozen=True):
    """One engine. `profile` (sim only): a file in configs/profiles, or the profile itself."""

    kind: Literal["torch", "sim", "tensorrt_llm"] = "torch"
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    device: Annotated[str, Meta(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"
    block_tokens: Literal[8, 16, 32, 64, 128] = 32
    kv_bytes: Annotated[int, Meta(ge=1 << 16)] = 1 << 30
    chunk_tokens: Positive = 512  # most tokens one step computes
    max_batch: Positive = 64  # most sequences one step computes
    threads: Positive = 1
    profile: str | SimProfile | None = None
    trtllm: TrtllmConfig = TrtllmConfig()


class Parallel(Section, frozen=True):
    tensor: Positive = 1
    pipeline: Positive = 1


class PoolConfig(Section, frozen=True):
    """One Serve deployment: the prefill or the decode workers of a variant."""

    replicas: Count = 1
    min_replicas: Count = 1
    max_replicas: Positive = 4
    cpus: Annotated[float, Meta(ge=0)] = 1
    gpus: Annotated[float, Meta(ge=0)] = 0
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    parallel: Parallel | None = None  # this pool's own; null: the variant's


class PromptRange(Section, frozen=True):
    """Prompts that a variant is for. Longer ones never go to it; shorter ones only when no other variant of
    the model can answer."""

    min: Positive = 1
    max: Positive | None = None


class Requires(Section, frozen=True):
    """What a worker must find where it starts; else it is refused in one line (serving/provenance.py)."""

    gpu: str | None = None  # a name of serving/gpu_catalog.py, or a part of the driver's name for the card
    quantization: str | None = None  # of the weights: FP8, W4A16_AWQ, ..., NO_QUANT
    weights_digest: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")] | None = None  # as /v1/models shows it


class Variant(Section, frozen=True):
    """One way to serve a model, with pools of its own."""

    weights: str  # a path, or a name the manifest knows
    name: Name = "main"
    prompt_tokens: PromptRange = PromptRange()
    requires: Requires = Requires()
    times: str | None = (
        None  # a profile by `python -m planner.profile`; null: learnt from the first requests
    )
    engine: EngineConfig = EngineConfig()
    parallel: Parallel = Parallel()
    prefill: PoolConfig = PoolConfig()
    decode: PoolConfig = PoolConfig()


class Model(Section, frozen=True):
    name: Name
    variants: Annotated[list[Variant], Meta(min_length=1)]
    slo: Slo = Slo()


class FrontendConfig(Section, frozen=True):
    """`labels`: of the nodes that may hold frontends and Control; none: any node. `max_per_node`: frontends
    that one node may hold, so that its loss does not take all; null: any number."""

    labels: dict[str, str] = msgspec.field(default_factory=dict)
    max_per_node: Positive | None = None
    replicas: Positive = 1
    max_replicas: Positive | None = None  # the planner may grow them to this; null: it leaves them alone
    max_inflight: Positive = 1024  # requests, of one frontend
    max_inflight_per_key: Positive | None = None  # the same, of one API key; null: no limit of its own
    body_limit_bytes: Annotated[int, Meta(ge=1024)] = 16 << 20
    max_slow_bodies: Positive = 128  # that still come after a second; beyond it the oldest is refused
    max_slow_bodies_per_key: Positive | None = 32  # the same, of one API key; null: no limit of its own
    unread_bytes: Annotated[int, Meta(ge=1024)] = 512 << 20  # that all unfinished bodies may hold
    unread_bytes_per_key: Annotated[int, Meta(ge=1024)] | None = 128 << 20  # the same, of one API key


class RouterConfig(Section, frozen=True):
    """`policy`: a name of kvrouter.policies.registry. `local_prefill`: decode workers may compute a prompt
    themselves when that is predicted to cost less than a hand-off. `pull`: a worker may read a cached
    prefix from another one when that is predicted to be faster than computing it."""

    policy: str = "ttft_regret"
    regret_weight: Annotated[float, Meta(ge=0, le=100)] = 1.0
    local_prefill: bool = True
    pull: bool = False


class AdmissionConfig(Section, frozen=True):
    """What is refused at once (docs/admission.md). `deadline`: what is predicted to have no first token
    before its deadline, the client's or `deadlines.queue_ms`. `slo`: what is predicted to miss the model's
    targets, or to make others miss theirs. `slack`: those limits, as a factor. `reserve`: part of the time
    and room that, while requests are refused, is kept for those with a better claim."""

    mode: Literal["off", "deadline", "slo"] = "deadline"
    slack: Annotated[float, Meta(gt=0, le=100)] = 1.0
    reserve: Annotated[float, Meta(ge=0, lt=1)] = 0.4


class Budget(Section, frozen=True):
    """What all pools together may take. The GPUs count where pools have some, the CPUs where none has;
    null: whatever their `max_replicas` come to."""

    cpus: Annotated[float, Meta(gt=0)] | None = None
    gpus: Annotated[float, Meta(gt=0)] | None = None


class PlannerConfig(Section, frozen=True):
    """`mode` is where it starts: advise reports, act scales; live by `kvrelay admin planner`.
    `startup_s`: from an order to a ready worker, until it was seen; `idle_to_zero_s`: null is never."""

    mode: Literal["off", "advise", "act"] = "off"
    interval_s: Annotated[float, Meta(ge=0.5, le=300)] = 5
    budget: Budget = Budget()
    predictor: Literal["blend", "last", "shape", "arima"] = "blend"
    startup_s: Annotated[float, Meta(ge=0, le=3600)] = 60
    down_window_s: Annotated[float, Meta(ge=0, le=86_400)] = 180
    flips: bool = True
    idle_to_zero_s: Annotated[float, Meta(ge=0)] | None = None


class Deadlines(Section, frozen=True):
    """How long each stage of a request may take before it counts as failed."""

    body_ms: Milliseconds = 30_000  # from the request's head to the end of its body
    request_ms: Milliseconds = 600_000
    queue_ms: Milliseconds = 60_000  # a deadline order may let shorter prompts pass for half of it
    prefill_ms: Milliseconds = 120_000
    transfer_ms: Milliseconds = 10_000
    first_token_ms: Milliseconds = 30_000
    silence_ms: Milliseconds = 5_000
    drain_ms: Milliseconds = 600_000  # a leaving worker lets streams that cannot move end for so long


class LinkConfig(Section, frozen=True):
    """`host`: interface that links bind, default the node's own address; `port` 0: any free one.
    `wire_version`: the newest version of the wire to speak; the older one is for upgrades in two steps."""

    host: str | None = None
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    key_file: str | None = None
    wire_version: Literal[1, 2] = 2


class SecurityConfig(Section, frozen=True):
    """`admin_key_file`: its content, as bearer token, opens the debug routes; without it there are none.
    `api_keys_file`: who may use the API, `name:key` or a key a line; without it everybody may."""

    api_keys_file: str | None = None
    admin_key_file: str | None = None


class HealthConfig(Section, frozen=True):
    """What a worker does to find out that it is of no use (serving/canary.py)."""

    canary_s: Annotated[float, Meta(ge=0)] = (
        30  # without a step for so long it generates by itself; 0: never
    )
    canary_timeout_s: Annotated[float, Meta(gt=0)] = 10
    free_blocks_floor: Count | None = None  # fewer that can be had while nothing runs: a leak; null: all


class AppConfig(Section, frozen=True):
    models: Annotated[list[Model], Meta(min_length=1)]
    frontend: FrontendConfig = FrontendConfig()
    router: RouterConfig = RouterConfig()
    admission: AdmissionConfig = AdmissionConfig()
    planner: PlannerConfig = PlannerConfig()
    deadlines: Deadlines = Deadlines()
    link: LinkConfig = LinkConfig()
    security: SecurityConfig = SecurityConfig()
    health: HealthConfig = HealthConfig()
    revision: Annotated[str, Meta(max_length=64)] = ""  # any text; a new one replaces every replica


def load_config(args: Mapping[str, Any]) -> AppConfig:
    """The settings in `args`; raises ConfigError naming key, value and what is allowed."""
    try:
        config = msgspec.convert(args, AppConfig)
    except msgspec.ValidationError as error:
        raise explain(error, args, AppConfig) from None
    _check_relations(config)
    return config


def _check_relations(config: AppConfig) -> None:
    """What no single field can say."""
    names = [model.name for model in config.models]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"models: name = {name!r} is used twice; every model needs its own")
    if config.link.host in ("", "0.0.0.0", "::"):
        raise ConfigError(
            f"link.host = {config.link.host!r}; allowed: an address of the node that its peers reach"
        )
    if config.router.policy not in POLICY_NAMES:
        allowed = ", ".join(POLICY_NAMES)
        raise ConfigError(f"router.policy = {config.router.policy!r}; allowed: {allowed}")
    for m, model in enumerate(config.models):
        variants = [variant.name for variant in model.variants]
        for v, variant in enumerate(model.variants):
            at = f"models[{m}].variants[{v}]"
            if variants.count(variant.name) > 1:
                raise ConfigError(f"{at}.name = {variant.name!r} is used twice within {model.name!r}")
            longest = variant.prompt_tokens.max
            if longest is not None and variant.prompt_tokens.min > longest:
                raise ConfigError(
                    f"{at}.prompt_tokens.min = {variant.prompt_tokens.min}; "
                    f"allowed: at most max ({longest})"
                )
            engine = variant.engine
            if engine.kind == "sim" and engine.profile is None:
                raise ConfigError(f"{at}.engine.profile is missing; engine kind 'sim' needs one")
            if engine.kind != "sim" and engine.profile is not None:
                raise ConfigError(f"{at}.engine.profile is for engine kind 'sim', not {engine.kind!r}")
            if engine.chunk_tokens < engine.block_tokens:
                raise ConfigError(
                    f"{at}.engine.chunk_tokens = {engine.chunk_tokens}; "
                    f"allowed: at least block_tokens ({engine.block_tokens})"
                )
            _check_trtllm(at, variant)
            for pool_name, pool in (("prefill", variant.prefill), ("decode", variant.decode)):
                if not pool.min_replicas <= pool.max_replicas:
                    raise ConfigError(
                        f"{at}.{pool_name}.min_replicas = {pool.min_replicas}; "
                        f"allowed: at most max_replicas ({pool.max_replicas})"
                    )
                if pool.replicas > pool.max_replicas:
                    raise ConfigError(
                        f"{at}.{pool_name}.replicas = {pool.replicas}; "
                        f"allowed: at most max_replicas ({pool.max_replicas})"
                    )
            if variant.decode.replicas < 1:
                raise ConfigError(f"{at}.decode.replicas = 0; allowed: 1 or more, decode answers requests")


# Settings of our own engines, and what has their place with TensorRT-LLM.
_NOT_OF_TRTLLM = {
    "dtype": "engine.trtllm.dtype",
    "kv_bytes": "engine.trtllm.free_gpu_memory_fraction",
    "chunk_tokens": "engine.trtllm.max_num_tokens",
    "device": "gpus of the pools",
}
_TOPOLOGY_PAIR = re.compile(r"tp[1-9]\d*pp[1-9]\d*>tp[1-9]\d*pp[1-9]\d*")


def _check_trtllm(at: str, variant: Variant) -> None:
    engine, ours = variant.engine, variant.engine.trtllm
    if engine.kind != "tensorrt_llm":
        if ours != TrtllmConfig():
            raise ConfigError(f"{at}.engine.trtllm is for engine kind 'tensorrt_llm', not {engine.kind!r}")
        return
    usual = EngineConfig()
    for name, instead in _NOT_OF_TRTLLM.items():
        if getattr(engine, name) != getattr(usual, name):
            raise ConfigError(f"{at}.engine.{name} is not for engine kind 'tensorrt_llm'; use {instead}")
    for pair in ours.topology_pairs:
        if not _TOPOLOGY_PAIR.fullmatch(pair):
            raise ConfigError(
                f"{at}.engine.trtllm.topology_pairs: {pair!r}; "
                "allowed: prefill>decode as in 'tp2pp1>tp1pp1'"
            )
    shapes = []
    for name, pool in (("prefill", variant.prefill), ("decode", variant.decode)):
        if name == "prefill" and not pool.replicas and not pool.min_replicas:
            continue  # decode workers prefill by themselves
        parallel = pool.parallel or variant.parallel
        world = parallel.tensor * parallel.pipeline
        if pool.gpus != world:
            raise ConfigError(
                f"{at}.{name}.gpus = {pool.gpus:g}; allowed: {world}, parallel.tensor x parallel.pipeline"
            )
        shapes.append(f"tp{parallel.tensor}pp{parallel.pipeline}")
    pair = ">".join(shapes)
    if len(set(shapes)) > 1 and pair not in ours.topology_pairs:
        raise ConfigError(
            f"{at}: prefill and decode have different layouts ({pair}), which gave wrong text before; "
            f"compare outputs, then put {pair!r} into engine.trtllm.topology_pairs"
        )
