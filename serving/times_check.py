"""Whether the times a variant is given were measured on what this worker is."""

from __future__ import annotations

from pathlib import Path

from planner.profile import device_name
from planner.timing_profile import check_profile, load_profile
from serving.config import Variant
from serving.errors import ConfigError, StartError


def check_times(variant: Variant, weights_digest: str) -> None:
    """Raises StartError, one line, for a profile of another model, engine, precision or device: it would be
    believed. Simulated engines are whatever their profile says."""
    if variant.times is None or variant.engine.kind == "sim":
        return
    try:
        check_profile(
            load_profile(Path(variant.times)),
            weights_digest=weights_digest,
            engine=variant.engine.kind,
            dtype=variant.engine.dtype,
            device=device_name(variant),
            path=variant.times,
        )
    except ConfigError as error:
        raise StartError(f"variant {variant.name!r}: {error.message}") from None
