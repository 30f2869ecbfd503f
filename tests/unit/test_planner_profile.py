"""Profiles: fitted from points, made by driving an engine, refused for another model or device."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from planner.fit_times import fit_prefill, fit_step
from planner.observation import FittedTimes
from planner.profile import main, make_profile, measure, provenance_of
from planner.profile_picture import draw_fit
from planner.timing_profile import Profile, Provenance, check_profile, load_profile, save_profile
from serving.config import EngineConfig, SimProfile, Variant, load_config
from serving.engine.sim import build_sim_engine
from serving.errors import ConfigError, StartError

MADE = Provenance(
    "m", "d" * 32, "torch", "bfloat16", "NVIDIA H200", "0.1", "2026-01-01", parallel="tp2pp1", threads=0
)


# As written before profiles told their layout.
BEFORE = """{
 "provenance": {"model": "m", "weights_digest": "d", "engine": "torch", "dtype": "bfloat16",
                "device": "NVIDIA H200", "version": "0.1", "date": "2026-01-01"},
 "times": {"prefill": [1,2,3], "step": [2,3,4], "prefill_spread": 0, "step_spread": 0, "samples": 9},
 "prefill_points": [], "step_points": []
}"""


def test_fits_find_the_coefficients() -> None:
    generator = random.Random(1)
    prefill = [
        (u, ctx, (2 + 0.05 * u + 1e-6 * u * (ctx - u / 2)) * generator.uniform(0.98, 1.02))
        for ctx in (100, 1000, 10_000, 50_000)
        for u in (ctx, ctx // 2, ctx // 8)
    ]
    fit = fit_prefill(prefill)
    assert fit.coefficients == pytest.approx((2, 0.05, 1e-6), rel=0.1)
    assert 0.001 < fit.spread < 0.02
    step = [(b, b * c, 10 + 0.2 * b + 1e-5 * b * c) for b in (1, 8, 64) for c in (100, 4000)]
    assert fit_step(step).coefficients == pytest.approx((10, 0.2, 1e-5), rel=1e-3)


def test_no_coefficient_is_negative() -> None:
    assert min(fit_step([(1, 10, 10.0), (2, 20, 9.0), (4, 40, 8.0), (4, 400, 8.5)]).coefficients) >= 0


def test_a_profile_of_a_real_engine_thread(tmp_path: Path) -> None:
    """A simulated engine of known times, driven as any other: the fit finds them again."""
    config = EngineConfig(
        kind="sim",
        block_tokens=8,
        kv_bytes=1 << 20,
        chunk_tokens=4096,
        max_batch=4,
        profile=SimProfile(
            step_ms=4, step_ms_per_sequence=1, prefill_ms_per_token=0.02, context_tokens=600
        ),
    )
    engine = build_sim_engine(config, config.profile, list(range(100, 1100)), frozenset(), "0" * 32)  # type: ignore[arg-type]
    said: list[str] = []
    prefill, step = measure(engine, 4, lambda stage, share: said.append(stage))
    profile = make_profile(MADE, prefill, step)
    assert said
    assert {context for _, context, _ in prefill} == {64, 128, 256, 512}
    assert {batch for batch, *_ in step} == {1, 2, 4}
    a, b, _ = profile.times.prefill
    assert 3 < a < 40, "a busy machine adds to it"
    assert b < 0.2
    assert profile.times.step[0] > 3
    path = tmp_path / "p.json"
    save_profile(profile, path)
    assert load_profile(path) == profile
    assert profile.models().step.ms(1, 0) == pytest.approx(profile.times.step[0] + profile.times.step[1])
    draw_fit(profile, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 10_000


def test_too_few_points_are_refused() -> None:
    with pytest.raises(StartError, match="only 1 prompts"):
        make_profile(MADE, [(1, 1, 1.0)], [])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        pytest.param({"weights_digest": "e" * 32}, "weights", id="model"),
        pytest.param({"parallel": "tp1pp1"}, "parallel 'tp1pp1'; allowed here: 'tp2pp1'", id="layout"),
        pytest.param({"threads": 4}, "threads 4; allowed here: 0", id="threads"),
        pytest.param({"parallel": ""}, "make it anew with python -m planner.profile", id="of before"),
        pytest.param({"device": "NVIDIA A100"}, "'NVIDIA A100'", id="device"),
        pytest.param({"dtype": "float32"}, "dtype", id="dtype"),
        pytest.param({"engine": "sim"}, "engine", id="engine"),
    ],
)
def test_a_profile_of_something_else_is_refused(changes: dict[str, object], says: str) -> None:
    profile = Profile(replace(MADE, **changes), FittedTimes((1, 1, 0), (1, 1, 0)))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=says) as refused:
        check_profile(profile, MADE)
    assert "\n" not in str(refused.value)


def test_its_own_profile_is_accepted() -> None:
    profile = Profile(MADE, FittedTimes((1, 1, 0), (1, 1, 0)))
    check_profile(profile, replace(MADE, model="other/path", version="0.2", date="2026-02-01"))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        pytest.param(None, "no such file", id="missing"),
        pytest.param("{}", "allowed", id="not one"),
        pytest.param(BEFORE.replace("[1,", "[-1,"), "prefill = .*; allowed: none below 0", id="below 0"),
        pytest.param(
            BEFORE.replace("[2,3,4]", "[0,0,0]"), "step = .*; allowed: none below 0", id="no time"
        ),
    ],
)
def test_a_bad_file_is_one_line(tmp_path: Path, content: str | None, says: str) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=says) as refused:
        load_profile(path)
    assert "\n" not in str(refused.value)


def test_a_profile_of_before_can_be_read_and_is_not_believed(tmp_path: Path) -> None:
    """The simulator takes it for what it is told to simulate; a worker does not start with it."""
    path = tmp_path / "x.json"
    path.write_text(BEFORE)
    profile = load_profile(path)
    assert (profile.provenance.parallel, profile.provenance.threads) == ("", 0)
    with pytest.raises(ConfigError, match="does not say in which layout"):
        check_profile(profile, MADE)


def variant_of(**settings: object) -> Variant:
    given = {"weights": "m", "engine": {"kind": "torch"}, **settings}
    return load_config({"models": [{"name": "m", "variants": [given]}]}).models[0].variants[0]


@pytest.mark.parametrize(
    ("settings", "parallel", "threads"),
    [
        pytest.param({"engine": {"kind": "torch", "threads": 3}}, ["tp1pp1"] * 2, 3, id="cpu"),
        pytest.param(
            {"engine": {"kind": "torch", "device": "cuda", "threads": 3}}, ["tp1pp1"] * 2, 0, id="gpu"
        ),
        pytest.param(
            {
                "engine": {"kind": "tensorrt_llm", "trtllm": {"topology_pairs": ["tp2pp1>tp4pp2"]}},
                "parallel": {"tensor": 2},
                "prefill": {"gpus": 2},
                "decode": {"gpus": 8, "parallel": {"tensor": 4, "pipeline": 2}},
            },
            ["tp2pp1", "tp4pp2"],
            0,
            id="unequal pools",
        ),
    ],
)
def test_provenance_tells_layout_and_threads(
    settings: dict[str, object], parallel: list[str], threads: int
) -> None:
    variant = variant_of(**settings)
    made = [provenance_of(variant, "d" * 32, role) for role in ("prefill", "decode")]
    assert [provenance.parallel for provenance in made] == parallel
    assert {provenance.threads for provenance in made} == {threads}


def test_a_variant_of_unequal_pools_is_not_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("""
applications:
- name: llm
  import_path: serving.app:build
  args:
    models:
    - name: m
      variants:
      - weights: m
        engine: {kind: tensorrt_llm, trtllm: {topology_pairs: ["tp1pp1>tp2pp1"]}}
        prefill: {gpus: 1}
        decode: {gpus: 2, parallel: {tensor: 2}}
""")
    assert main([f"--config={config}", f"--out={tmp_path}/x"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert (
        "m/main has prefill workers of tp1pp1, decode workers of tp2pp1: no profile holds for both" in said
    )
