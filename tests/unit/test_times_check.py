"""A profile of another model or machine is refused where the worker starts, in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from planner.observation import FittedTimes
from planner.profile import device_name
from planner.timing_profile import Profile, Provenance, save_profile
from serving.config import EngineConfig, Variant
from serving.errors import StartError
from serving.times_check import check_times

DIGEST = "d" * 32


def variant(tmp_path: Path, kind: str = "torch", **other: str) -> Variant:
    spec = Variant(weights="w", engine=EngineConfig(kind=kind, profile="zero" if kind == "sim" else None))  # type: ignore[arg-type]
    made = Provenance("w", DIGEST, kind, spec.engine.dtype, device_name(spec), "1", "2026-01-01")
    path = tmp_path / "times.json"
    save_profile(Profile(replace(made, **other), FittedTimes((1, 1, 0), (1, 1, 0))), path)
    return Variant(weights="w", engine=spec.engine, times=str(path))


def test_its_own_profile_is_taken(tmp_path: Path) -> None:
    check_times(variant(tmp_path), DIGEST)
    check_times(Variant(weights="w"), DIGEST)


@pytest.mark.parametrize(
    "other",
    [{"weights_digest": "e" * 32}, {"engine": "tensorrt_llm"}, {"dtype": "float32"}, {"device": "H200"}],
    ids=lambda other: next(iter(other)),
)
def test_another_ones_is_refused(tmp_path: Path, other: dict[str, str]) -> None:
    with pytest.raises(StartError, match="was measured with") as refused:
        check_times(variant(tmp_path, **other), DIGEST)
    assert next(iter(other.values())) in refused.value.message
    assert "\n" not in refused.value.message


def test_a_simulated_engine_is_what_its_profile_says(tmp_path: Path) -> None:
    check_times(variant(tmp_path, "sim", device="anything"), "e" * 32)
