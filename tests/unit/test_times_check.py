"""A profile of another model or machine is refused where the worker starts, in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from planner.observation import FittedTimes
from planner.profile import provenance_of
from planner.timing_profile import Profile, save_profile
from serving.config import EngineConfig, Parallel, PoolConfig, Variant
from serving.errors import StartError
from serving.times_check import check_times

DIGEST = "d" * 32


def variant(tmp_path: Path, kind: str = "torch", **other: str | int) -> Variant:
    spec = Variant(weights="w", engine=EngineConfig(kind=kind, profile="zero" if kind == "sim" else None))  # type: ignore[arg-type]
    path = tmp_path / "times.json"
    made = replace(provenance_of(spec, DIGEST), **other)  # type: ignore[arg-type]
    save_profile(Profile(made, FittedTimes((1, 1, 0), (1, 1, 0))), path)
    return Variant(weights="w", engine=spec.engine, times=str(path))


def test_its_own_profile_is_taken(tmp_path: Path) -> None:
    check_times(variant(tmp_path), DIGEST, "prefill")
    check_times(Variant(weights="w"), DIGEST, "decode")


@pytest.mark.parametrize(
    "other",
    [
        {"weights_digest": "e" * 32},
        {"engine": "tensorrt_llm"},
        {"dtype": "float32"},
        {"device": "H200"},
        {"parallel": "tp8pp1"},
        {"threads": 7},
    ],
    ids=lambda other: next(iter(other)),
)
def test_another_ones_is_refused(tmp_path: Path, other: dict[str, str | int]) -> None:
    with pytest.raises(StartError, match="was measured with") as refused:
        check_times(variant(tmp_path, **other), DIGEST, "decode")  # type: ignore[arg-type]
    assert repr(next(iter(other.values()))) in refused.value.message
    assert "\n" not in refused.value.message


def test_a_pool_of_another_layout_refuses_what_the_other_pool_takes(tmp_path: Path) -> None:
    """One decode worker spans two GPUs here."""
    times = variant(tmp_path).times
    unequal = Variant(weights="w", times=times, decode=PoolConfig(parallel=Parallel(tensor=2)))
    check_times(unequal, DIGEST, "prefill")
    with pytest.raises(StartError, match="parallel 'tp1pp1'; allowed here: 'tp2pp1'"):
        check_times(unequal, DIGEST, "decode")


def test_one_that_does_not_say_its_layout_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="make it anew with python") as refused:
        check_times(variant(tmp_path, parallel=""), DIGEST, "decode")
    assert "\n" not in refused.value.message


def test_a_simulated_engine_is_what_its_profile_says(tmp_path: Path) -> None:
    check_times(variant(tmp_path, "sim", device="anything", parallel=""), "e" * 32, "decode")
