"""From our settings to the arguments of `LLM(...)`, held against what the installed version accepts."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from serving.config import EngineConfig, Parallel
from serving.engine.trtllm.api import Api
from serving.engine.trtllm.checkpoint import Checkpoint
from serving.errors import ConfigError

_AT = "engine.trtllm"
# Arguments that are ours to set: an `extra` of that name would take the engine out of our hands.
RESERVED = {
    "model", "tokenizer", "skip_tokenizer_init", "tensor_parallel_size", "pipeline_parallel_size",
    "backend", "orchestrator_type", "ray_placement_config", "max_batch_size", "max_num_tokens",
    "max_seq_len",
    "max_beam_width", "dtype", "enable_chunked_prefill", "disable_overlap_scheduler",
    "guided_decoding_backend", "enable_lora", "enable_iter_perf_stats", "env_overrides", "stream_interval",
}  # fmt: skip
RESERVED_IN_SECTIONS = {
    "kv_cache_config": {
        "tokens_per_block", "free_gpu_memory_fraction", "event_buffer_max_size", "enable_block_reuse",
        "dtype", "host_cache_size", "kv_events_config",
    },
    "cache_transceiver_config": {
        "backend", "transceiver_runtime", "kv_transfer_timeout_ms", "max_tokens_in_buffer",
    },
}  # fmt: skip


def llm_arguments(
    api: Api,
    config: EngineConfig,
    parallel: Parallel,
    role: str,
    checkpoint: Checkpoint,
    *,
    placement: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What to call `LLM` with. `placement`: of the Ray orchestrator (serving.engine.trtllm.placement).

    Raises ConfigError, one line, for a setting that the installed version does not know.
    """
    ours = config.trtllm
    context = checkpoint.context_tokens(ours.max_seq_len)
    kv: dict[str, Any] = {
        "enable_block_reuse": True,
        "tokens_per_block": config.block_tokens,
        "free_gpu_memory_fraction": ours.free_gpu_memory_fraction,
        "event_buffer_max_size": ours.event_buffer,
    }
    if ours.kv_dtype != "auto":
        kv["dtype"] = ours.kv_dtype
    if ours.host_cache_bytes:
        kv["host_cache_size"] = ours.host_cache_bytes
    transceiver: dict[str, Any] = {
        "backend": "NIXL",  # None is off, and DEFAULT asks the environment
        "max_tokens_in_buffer": ours.max_tokens_in_buffer or context,
        "kv_transfer_timeout_ms": int(
            ours.transfer_timeout_ms + ours.transfer_ms_per_1k_tokens * context / 1e3
        ),
    }
    if api.has("cache_transceiver_config", "transceiver_runtime"):
        transceiver["transceiver_runtime"] = ours.transceiver_runtime
    elif ours.transceiver_runtime != "CPP":
        raise ConfigError(
            f"{_AT}.transceiver_runtime = {ours.transceiver_runtime!r}; "
            "allowed with the installed tensorrt_llm: CPP, its only one"
        )
    arguments: dict[str, Any] = {
        "model": str(checkpoint.directory),
        # A grammar is checked against the tokens' texts; nothing else needs a tokenizer there.
        "skip_tokenizer_init": ours.guided_backend is None,
        "dtype": ours.dtype,
        "tensor_parallel_size": parallel.tensor,
        "pipeline_parallel_size": parallel.pipeline,
        "max_batch_size": config.max_batch,
        "max_num_tokens": ours.max_num_tokens,
        "max_seq_len": context,
        "max_beam_width": 1,
        "enable_chunked_prefill": ours.chunked_prefill,
        "disable_overlap_scheduler": role == "prefill" or not ours.overlap_scheduler,
        "enable_iter_perf_stats": True,
        "kv_cache_config": kv,
        "cache_transceiver_config": transceiver,
    }
    if not ours.cuda_graph:
        arguments["cuda_graph_config"] = None
    if ours.guided_backend is not None:
        arguments["guided_decoding_backend"] = ours.guided_backend
    if ours.lora:
        arguments["enable_lora"] = True
    if ours.env:
        arguments["env_overrides"] = dict(ours.env)
    if ours.orchestrator == "ray":
        arguments["orchestrator_type"] = "ray"
        if placement is not None:
            arguments["ray_placement_config"] = dict(placement)
    _check_known(api, arguments, "the installed tensorrt_llm has no LLM argument")
    _add_extra(api, arguments, ours.extra)
    return arguments


def _check_known(api: Api, arguments: Mapping[str, Any], what: str) -> None:
    for name, value in arguments.items():
        if name not in api.llm_arguments:
            raise ConfigError(f"{what} {name!r}: it is too old or too new for {_AT}")
        fields = api.section_fields.get(name)
        if fields and isinstance(value, dict):
            for field in value:
                if field not in fields:
                    raise ConfigError(f"{what} {name}.{field!r}: it is too old or too new for {_AT}")


def _add_extra(api: Api, arguments: dict[str, Any], extra: Mapping[str, Any]) -> None:
    for name, given in extra.items():
        value = given
        at = f"{_AT}.extra.{name}"
        if name in RESERVED:
            raise ConfigError(f"{at}: that is set by KVRelay; use the settings of engine and {_AT}")
        if name not in api.llm_arguments:
            raise _unknown(at, name, api.llm_arguments)
        fields = api.section_fields.get(name)
        if fields and isinstance(value, dict):
            for field in value:
                if field in RESERVED_IN_SECTIONS.get(name, ()):
                    raise ConfigError(f"{at}.{field}: that is set by KVRelay; use the settings of {_AT}")
                if field not in fields:
                    raise _unknown(f"{at}.{field}", field, fields)
            value = {**(arguments.get(name) or {}), **value}
        elif name in RESERVED_IN_SECTIONS:
            raise ConfigError(f"{at} = {value!r}; allowed: a mapping")
        arguments[name] = value


def _unknown(at: str, name: str, known: frozenset[str]) -> ConfigError:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return ConfigError(f"{at}: the installed tensorrt_llm has no such field{hint}")
