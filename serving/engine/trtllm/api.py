"""What the installed `tensorrt_llm` offers, found by looking at it: versions differ in names and fields.

Nothing here compares version numbers. What was looked for and is absent is None, or not in a set of names.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from serving.errors import StartError

# Arguments of LLM(...) that are sections of their own, and the class of each.
SECTIONS = {
    "kv_cache_config": "KvCacheConfig",
    "cache_transceiver_config": "CacheTransceiverConfig",
    "scheduler_config": "SchedulerConfig",
    "cuda_graph_config": "CudaGraphConfig",
}


class NoSuchError(Exception):
    """Stands for an error class that the installed version does not have: never raised."""


@dataclass(frozen=True, slots=True)
class Api:
    """Classes and what they accept."""

    version: str  # told to peers, so that only equal ones hand over
    llm: Any
    sampling_params: Any
    disaggregated_params: Any
    guided_params: Any | None
    retention: Any | None
    token_range: Any | None
    lora_request: Any | None
    logprob: Any | None
    request_error: type[BaseException]
    llm_arguments: frozenset[str]
    section_fields: Mapping[str, frozenset[str]]
    generate_arguments: frozenset[str]
    disaggregated_fields: frozenset[str]
    sampling_fields: frozenset[str]

    def has(self, section: str, field: str) -> bool:
        """`LLM(section={field: ...})` is understood."""
        return field in self.section_fields.get(section, ())


def load_api() -> Api:
    """Import the package; raises StartError, one line, when it is not there or is not what it should be."""
    try:
        package = importlib.import_module("tensorrt_llm")
        llmapi = importlib.import_module("tensorrt_llm.llmapi")
        llm = package.LLM
        sampling = package.SamplingParams
        disaggregated = llmapi.DisaggregatedParams
    except ModuleNotFoundError as error:
        raise StartError(
            f"engine.kind = 'tensorrt_llm' needs the package {error.name!r}, which is not installed here "
            "(pip install 'kvrelay[tensorrt]', on a node with NVIDIA GPUs)"
        ) from error
    except Exception as error:  # its import loads CUDA libraries: anything can be missing
        raise StartError(f"tensorrt_llm cannot be imported: {one_line(error)}") from error
    retention = _find("tensorrt_llm.llmapi", "KvCacheRetentionConfig")
    arguments = _find("tensorrt_llm.llmapi.llm_args", "TorchLlmArgs")
    if arguments is None:
        raise StartError(
            "the installed tensorrt_llm has no TorchLlmArgs: it is older than 1.2, or not TensorRT-LLM"
        )
    request_error = _find("tensorrt_llm.executor.utils", "RequestError")
    sections = {
        name: frozenset(fields_of(getattr(llmapi, kind)))
        for name, kind in SECTIONS.items()
        if hasattr(llmapi, kind)
    }
    return Api(
        version=str(getattr(package, "__version__", "")),
        llm=llm,
        sampling_params=sampling,
        disaggregated_params=disaggregated,
        guided_params=_find("tensorrt_llm.llmapi", "GuidedDecodingParams"),
        retention=retention,
        token_range=getattr(retention, "TokenRangeRetentionConfig", None),
        lora_request=_find("tensorrt_llm.executor.request", "LoRARequest"),
        logprob=_find("tensorrt_llm.executor.result", "Logprob"),
        request_error=request_error if isinstance(request_error, type) else NoSuchError,
        llm_arguments=frozenset(fields_of(arguments)) | named_parameters(llm.__init__),
        section_fields=MappingProxyType(sections),
        generate_arguments=named_parameters(llm.generate_async),
        disaggregated_fields=frozenset(fields_of(disaggregated)),
        sampling_fields=frozenset(fields_of(sampling)),
    )


def fields_of(kind: Any) -> list[str]:
    """Names a model, dataclass or compiled class takes by keyword."""
    for attribute in ("model_fields", "__dataclass_fields__"):
        fields = getattr(kind, attribute, None)
        if fields:
            return list(fields)
    try:
        return sorted(named_parameters(kind))
    except (TypeError, ValueError):  # compiled, without a signature
        return []


def named_parameters(function: Any) -> frozenset[str]:
    """Of a signature: without `self` and without what stands for "any others"."""
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return frozenset(
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if name != "self" and parameter.kind not in kinds
    )


def one_line(error: BaseException, limit: int = 400) -> str:
    """What an error says, fit for a log line and a client."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _find(module: str, name: str) -> Any | None:
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
