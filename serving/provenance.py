"""What a worker serves, exactly: engine, driver, GPU, weights, precision, settings.

Built and checked at its start, shown by `/v1/models` and as the metric `kvrelay_variant_info`. The digest
of the weights is `serving.manifest.model_digest`: of config.json and, for every safetensors file, of name,
size, header and samples of the content. It costs milliseconds, also for weights of 100 GB, and differs
between fine-tunes of one base; a value changed on purpose between the samples it does not see.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from serving import __version__
from serving.config import Requires, Variant
from serving.errors import ConfigError, StartError
from serving.gpu_catalog import find_gpu, identify
from serving.gpu_probe import Device, GpuState, probe
from serving.manifest import model_digest, resolve_weights
from serving.metrics import Registry
from serving.model_shape import read_precision
from serving.quantization import NONE
from serving.worker_spec import on_gpu, parallel_of

PACKAGES = {"torch": ("torch", "transformers"), "tensorrt_llm": ("tensorrt_llm",), "sim": ()}
NO_GPU = "cpu"
UNKNOWN = "unknown"


class Provenance(msgspec.Struct, frozen=True):
    """All text, so that every field can be a metric's label; `unknown` where it could not be told."""

    engine: str  # torch | sim | tensorrt_llm
    engine_version: str  # "torch 2.13.0+cpu, transformers 5.24.0"
    kvrelay_version: str
    gpu: str  # a name of the catalogue, else the driver's; "cpu"
    driver: str
    cuda: str  # the newest that the driver speaks
    parallel: str  # "tp2pp1"
    weights_digest: str  # 32 hex digits
    quantization: str  # of the weights: FP8, ..., NO_QUANT
    kv_dtype: str
    settings_digest: (
        str  # 16 hex digits: of everything in the variant that changes what is served, or how fast
    )


def provenance_of(
    variant: Variant, role: str, directory: Path, *, ask: Callable[[], GpuState] = probe
) -> Provenance:
    """Of a worker of the pool `role` on this machine, with weights in `directory`.

    Raises StartError, one line, when the worker is not what `variant.requires` says; ConfigError for a
    config.json that is none.
    """
    quantization, kv_dtype = _precision(variant, directory)
    state = ask() if on_gpu(variant) else GpuState()
    digest = model_digest(directory)
    try:
        check_requirements(variant.requires, state.devices, quantization, digest)
    except StartError as error:
        raise StartError(f"variant {variant.name!r}: {error.message}") from None
    parallel = parallel_of(variant, role)
    return Provenance(
        engine=variant.engine.kind,
        engine_version=_versions(PACKAGES[variant.engine.kind]) or f"kvrelay {__version__}",
        kvrelay_version=__version__,
        gpu=_gpu_name(state.devices) if on_gpu(variant) else NO_GPU,
        driver=state.driver or (UNKNOWN if on_gpu(variant) else NO_GPU),
        cuda=state.cuda or (UNKNOWN if on_gpu(variant) else NO_GPU),
        parallel=f"tp{parallel.tensor}pp{parallel.pipeline}",
        weights_digest=digest,
        quantization=quantization,
        kv_dtype=kv_dtype,
        settings_digest=settings_digest(variant),
    )


def start_provenance(variant: Variant, role: str) -> Provenance:
    """`provenance_of` with the variant's own weights; a known model is prepared first."""
    return provenance_of(variant, role, resolve_weights(variant.weights))


def check_requirements(
    requires: Requires, devices: Sequence[Device], quantization: str, digest: str
) -> None:
    """`devices`: those the worker computes on. Raises StartError, one line, for the first thing not met."""
    if requires.gpu is not None:
        if not devices:
            raise StartError(f"requires.gpu = {requires.gpu!r}; this worker has no GPU")
        for device in devices:
            if not _is_type(requires.gpu, device):
                raise StartError(f"requires.gpu = {requires.gpu!r}; this worker has: {device.name}")
    if requires.quantization is not None and requires.quantization.upper() != quantization.upper():
        raise StartError(
            f"requires.quantization = {requires.quantization!r}; these weights are {quantization}"
        )
    if requires.weights_digest is not None and requires.weights_digest != digest:
        raise StartError(f"requires.weights_digest = {requires.weights_digest}; these weights are {digest}")


def _is_type(wanted: str, device: Device) -> bool:
    try:
        return identify(device.name, device.memory_bytes) == find_gpu(wanted)
    except ConfigError:  # none of the catalogue: the driver's own words decide
        return wanted.upper() in device.name.upper()


def _gpu_name(devices: tuple[Device, ...]) -> str:
    names = []
    for device in devices:
        known = identify(device.name, device.memory_bytes)
        names.append(known.name if known is not None else device.name)
    return ", ".join(dict.fromkeys(names)) or UNKNOWN


def _precision(variant: Variant, directory: Path) -> tuple[str, str]:
    """(weights, KV); a simulated model has neither."""
    engine = variant.engine
    if engine.kind == "sim":
        return NONE, UNKNOWN
    weights, kv, dtype = read_precision(directory)
    if engine.kind == "torch":
        return weights or NONE, engine.dtype
    if engine.trtllm.kv_dtype != "auto":
        return weights or NONE, engine.trtllm.kv_dtype
    return weights or NONE, kv or (dtype if engine.trtllm.dtype == "auto" else engine.trtllm.dtype)


def _versions(packages: Iterable[str]) -> str:
    found = []
    for package in packages:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            found.append(f"{package} {UNKNOWN}")
    return ", ".join(found)


def settings_digest(variant: Variant) -> str:
    """Of engine, layout and prompt range. Not of where weights lie, nor of how many workers there are."""
    settings = (variant.engine, variant.parallel, variant.prefill.parallel, variant.decode.parallel)
    canonical = msgspec.json.encode((*settings, variant.prompt_tokens), order="sorted")
    return hashlib.sha256(canonical).hexdigest()[:16]


def export(registry: Registry, provenance: Provenance) -> None:
    """As `kvrelay_variant_info`, always 1; the values are its labels."""
    names = Provenance.__struct_fields__
    values = tuple(str(getattr(provenance, name)) for name in names)
    registry.gauge("variant_info", "What a worker serves; the labels say it", lambda: {values: 1.0}, names)


def merged(found: Iterable[tuple[str, str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """What `/v1/models` says of (variant, pool, provenance) of each worker: equal ones once, with counts.

    More than one entry of a variant means that its workers differ: unequal pools, or a rollout.
    """
    entries: list[tuple[dict[str, Any], dict[str, int]]] = []
    for variant, pool, provenance in found:
        said = {"variant": variant, **provenance}
        for known, workers in entries:
            if known == said:
                workers[pool] = workers.get(pool, 0) + 1
                break
        else:
            entries.append((said, {pool: 1}))
    return [{**said, "workers": workers} for said, workers in entries]
