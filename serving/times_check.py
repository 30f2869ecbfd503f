"""Whether the times a variant is given were measured on what this worker is."""

from __future__ import annotations

from pathlib import Path

from planner.profile import provenance_of
from planner.timing_profile import check_profile, load_profile
from serving.config import Variant
from serving.errors import ConfigError, StartError


def check_times(variant: Variant, weights_digest: str, role: str) -> None:
    """Raises StartError, one line, for a profile of another model, engine, precision, device or layout than
    a worker of the pool `role` has: it would be believed. Simulated engines are what their profile says."""
    if variant.times is None or variant.engine.kind == "sim":
        return
    try:
        here = provenance_of(variant, weights_digest, role)
        check_profile(load_profile(Path(variant.times)), here, variant.times)
    except ConfigError as error:
        raise StartError(f"variant {variant.name!r}: {error.message}") from None
