"""What `check` finds: every mistake with a remedy, the worst first, and nothing in what is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner.observation import FittedTimes
from planner.timing_profile import Profile, Provenance, save_profile
from serving.config_review import Level
from serving.pool_capacity import Options
from tests.unit.review_mistakes import MISTAKES
from tests.unit.review_rig import LLAMA_8B, E, N, W, found, shape, sim, torch, trtllm
from tests.unit.tiny_models import save_tiny_model

RIGHT = {
    "tensorrt_llm": (trtllm(), LLAMA_8B),
    "sim": (sim(), Options()),
    "as tight as it may be": (trtllm(trtllm={"free_gpu_memory_fraction": 0.86}), LLAMA_8B),
    "no GPU known, no weights here": (trtllm(), Options()),
    "70B on two": (
        trtllm(
            parallel={"tensor": 2},
            trtllm={"free_gpu_memory_fraction": 0.77, "kv_dtype": "fp8"},
            requires={"quantization": "FP8"},
        ),
        shape("llama-3.1-70b"),
    ),
    "fp8 KV for short prompts of a long model": (
        trtllm(trtllm={"kv_dtype": "fp8"}, prompt_tokens={"max": 7000}, engine={"max_batch": 150}),
        LLAMA_8B,
    ),
}


@pytest.mark.parametrize(("args", "options"), RIGHT.values(), ids=RIGHT)
def test_nothing_to_find(args: dict[str, Any], options: Options) -> None:
    assert [finding for finding in found(args, options) if finding.level is not N] == []


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(name: str) -> None:
    args, options, level, setting, problem, remedy = MISTAKES[name]
    all_of_them = found(args, options)
    matching = [
        f
        for f in all_of_them
        if f.level is level and f.where.endswith(setting) and problem in f.problem and remedy in f.remedy
    ]
    assert len(matching) == 1, "\n".join(map(str, all_of_them))
    assert "\n" not in matching[0].problem + matching[0].remedy


def test_the_worst_comes_first() -> None:
    levels = [
        f.level for f in found(trtllm(parallel={"tensor": 3}, trtllm={"max_tokens_in_buffer": 32768}))
    ]
    assert levels == sorted(levels, key=list(Level).index)
    assert {E, W} <= set(levels)


def test_a_remedy_is_one() -> None:
    """What `check` says about a tight card does what it promises."""
    tight = trtllm(trtllm={"free_gpu_memory_fraction": 0.97})
    (finding,) = found(tight)
    fraction = float(finding.remedy.split(": ")[1].split(",")[0])
    assert found(trtllm(trtllm={"free_gpu_memory_fraction": fraction})) == []


def test_a_checkpoint_that_contradicts_is_an_error(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 640}))
    (finding, *_) = found(torch(weights=str(tmp_path)), Options())
    assert finding.level is E
    assert "embed_tokens.weight is 320 x 48; config.json says 640 x 48" in finding.problem


def test_weights_that_are_not_those_required(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    pinned = torch(weights=str(tmp_path), requires={"weights_digest": "a" * 32})
    problems = [f.problem for f in found(pinned, Options()) if f.where.endswith("weights_digest")]
    assert len(problems) == 1
    assert "the weights here are" in problems[0]


@pytest.mark.parametrize(
    ("slo", "expected"),
    [
        ({"ttft_ms": 600, "itl_ms": 60}, []),
        ({"ttft_ms": 300, "itl_ms": 60}, ["ttft_ms = 300 is out of reach; best is 500.1 ms"]),
        ({"ttft_ms": 600, "itl_ms": 50}, ["itl_ms = 50 is out of reach; best is 50.2 ms"]),
        (
            {"ttft_ms": 600, "itl_ms": 60, "classes": {"chat": {"ttft_ms": 100, "itl_ms": 60}}},
            ["classes.chat.ttft_ms = 100 is out of reach; best is 500.1 ms"],
        ),
    ],
    ids=["within reach", "ttft", "itl", "of a class"],
)
def test_targets_below_what_the_profile_says_is_possible(
    slo: dict[str, Any], expected: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "times.json"
    made = Provenance("w", "d" * 32, "sim", "float32", "cpu", "1", "2026-01-01")
    save_profile(Profile(made, FittedTimes((500.0, 0.1, 0.0), (50.0, 0.2, 0.0))), path)
    args = sim()
    args["models"][0] |= {"slo": slo}
    args["models"][0]["variants"][0] |= {"times": str(path)}
    findings = [(f.level, f.where, f.problem) for f in found(args) if f.level is not N]
    assert findings == [(W, "m/main slo", problem) for problem in expected]


def test_a_profile_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_text("{}")
    args = sim()
    args["models"][0]["variants"][0] |= {"times": str(path)}
    findings = [(f.level, f.where) for f in found(args) if f.level is not N]
    assert findings == [(E, "m/main times")]


@pytest.mark.parametrize("of", [sim, torch], ids=["sim", "torch"])
def test_weights_that_are_not_here_are_noted(of: Any) -> None:
    args = of()
    args["models"][0]["variants"][0]["weights"] = "/nope"
    notes = [f for f in found(args, Options()) if f.where == "m/main weights"]
    assert [(f.level, "/nope is not on this machine" in f.problem) for f in notes] == [(N, True)]
    args["models"][0]["variants"][0]["weights"] = "smollm2-135m"  # one that is made when it is needed
    assert not [f for f in found(args, Options()) if f.where == "m/main weights"]
