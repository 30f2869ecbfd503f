"""From a variant's settings and its model's shape to what the capacity maths and the review work on."""

from __future__ import annotations

from pathlib import Path

from serving.capacity import Limits, WorkerSpec
from serving.config import Parallel, SimProfile, Variant
from serving.footprint import KvCost, Placement, Precision
from serving.gpu_catalog import GpuType
from serving.manifest import KNOWN, prepared_directory
from serving.model_shape import ModelShape
from serving.quantization import Quantization, find_quantization

ROLES = ("prefill", "decode")


def parallel_of(variant: Variant, role: str) -> Parallel:
    pool = variant.prefill if role == "prefill" else variant.decode
    return pool.parallel or variant.parallel


def placement_of(variant: Variant, role: str) -> Placement:
    parallel = parallel_of(variant, role)
    if variant.engine.kind != "tensorrt_llm":
        return Placement(parallel.tensor, parallel.pipeline)
    attention_dp = bool(variant.engine.trtllm.extra.get("enable_attention_dp", False))
    return Placement(parallel.tensor, parallel.pipeline, attention_dp)


def on_gpu(variant: Variant) -> bool:
    engine = variant.engine
    return engine.kind == "tensorrt_llm" or (engine.kind == "torch" and engine.device != "cpu")


def context_of(variant: Variant, shape: ModelShape) -> int:
    """Most tokens of a prompt and its answer."""
    longest = variant.engine.trtllm.max_seq_len if variant.engine.kind == "tensorrt_llm" else None
    return longest or shape.context_tokens


def longest_prompt(variant: Variant, context_tokens: int) -> int:
    return min(variant.prompt_tokens.max or context_tokens, context_tokens)


def weight_quantization(variant: Variant, shape: ModelShape) -> Quantization | None:
    """What the checkpoint says, else what the variant requires; the torch engine computes as it is told."""
    if variant.engine.kind != "tensorrt_llm":
        return None
    if shape.quantization is not None:
        return find_quantization(shape.quantization, "the checkpoint's quantisation")
    return find_quantization(variant.requires.quantization, "requires.quantization")


def precision_of(variant: Variant, shape: ModelShape) -> Precision:
    """Raises ConfigError for a quantisation whose size nobody here knows."""
    engine = variant.engine
    if engine.kind != "tensorrt_llm":
        return Precision(None, engine.dtype, engine.dtype)
    dtype = shape.dtype if engine.trtllm.dtype == "auto" else engine.trtllm.dtype
    return Precision(weight_quantization(variant, shape), dtype, kv_dtype_of(variant, shape))


def kv_dtype_of(variant: Variant, shape: ModelShape) -> str:
    ours = variant.engine.trtllm
    if ours.kv_dtype != "auto":
        return ours.kv_dtype
    return shape.kv_quantization or (shape.dtype if ours.dtype == "auto" else ours.dtype)


def worker_spec(
    variant: Variant, role: str, shape: ModelShape, gpu: GpuType | None, reserve_bytes: int | None = None
) -> WorkerSpec:
    """A worker of the pool `role`. Not for simulated models: they have no weights (`sim_kv`)."""
    engine = variant.engine
    context = context_of(variant, shape)
    if engine.kind == "tensorrt_llm":
        trtllm = engine.trtllm
        buffered = 0
        if trtllm.transceiver_runtime == "CPP":  # the Python one has none
            buffered = trtllm.max_tokens_in_buffer or context
        limits = Limits(
            max_batch=engine.max_batch,
            step_tokens=trtllm.max_num_tokens,
            context_tokens=context,
            block_tokens=engine.block_tokens,
            kv_fraction=trtllm.free_gpu_memory_fraction,
            transfer_tokens=buffered,
            reserve_bytes=reserve_bytes,
        )
    else:
        limits = Limits(
            max_batch=engine.max_batch,
            step_tokens=engine.chunk_tokens,
            context_tokens=context,
            block_tokens=engine.block_tokens,
            kv_bytes=engine.kv_bytes,
            reserve_bytes=reserve_bytes,
        )
    place = placement_of(variant, role)
    return WorkerSpec(shape, precision_of(variant, shape), place, limits, gpu if on_gpu(variant) else None)


def sim_limits(variant: Variant, profile: SimProfile) -> tuple[KvCost, Limits]:
    engine = variant.engine
    limits = Limits(
        max_batch=engine.max_batch,
        step_tokens=engine.chunk_tokens,
        context_tokens=profile.context_tokens,
        block_tokens=engine.block_tokens,
        kv_bytes=engine.kv_bytes,
    )
    return KvCost(profile.kv_bytes_per_token, 0, None, engine.block_tokens), limits


def find_weights(weights: str) -> Path | None:
    """The directory with the config.json of `weights`; None when it is not on this machine.

    Looks into the Hugging Face cache too. Converts nothing and downloads nothing.
    """
    if weights in KNOWN:
        return prepared_directory(weights)
    path = Path(weights).expanduser()
    return path if (path / "config.json").is_file() else _in_hugging_face_cache(weights)


def _in_hugging_face_cache(repository: str) -> Path | None:
    if repository.count("/") != 1 or repository.startswith(("/", ".", "~")):
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(repository, "config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None
