"""What `check` finds: every mistake with a remedy, the worst first, and nothing in what is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

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
