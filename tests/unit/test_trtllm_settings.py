"""Settings of TensorRT-LLM engines that contradict each other or the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from serving.config import Parallel, TrtllmConfig, load_config
from serving.engine.trtllm.checkpoint import check_shape, read_checkpoint
from serving.errors import ConfigError
from tests.unit.trtllm_rig import BLOCK, save_model

SHAPES: dict[str, tuple[Parallel, dict[str, Any], list[str]]] = {
    "heads": (Parallel(3), {}, ["parallel.tensor = 3", "4 attention heads"]),
    "layers": (Parallel(1, 3), {}, ["parallel.pipeline = 3", "2 layers"]),
    "context": (Parallel(), {"max_seq_len": 4096}, ["max_seq_len = 4096", "made for 1024"]),
    "buffer": (Parallel(), {"max_tokens_in_buffer": 512}, ["max_tokens_in_buffer = 512", "1024 tokens"]),
    "step": (Parallel(), {"max_num_tokens": 4}, ["max_num_tokens = 4", "block_tokens (8)"]),
    "nvfp4": (Parallel(), {"kv_dtype": "nvfp4"}, ["kv_dtype = 'nvfp4'", "ModelOpt"]),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_checkpoint_that_contradicts_the_settings(name: str, tmp_path: Path) -> None:
    parallel, section, parts = SHAPES[name]
    checkpoint = read_checkpoint(save_model(tmp_path))
    with pytest.raises(ConfigError) as caught:
        check_shape(checkpoint, parallel, TrtllmConfig(**section), BLOCK)
    for part in parts:
        assert part in caught.value.message


def test_a_quantised_checkpoint_tells_its_kv(tmp_path: Path) -> None:
    save_model(tmp_path)
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    checkpoint = read_checkpoint(tmp_path)
    assert (checkpoint.quant_algo, checkpoint.kv_quant_algo) == ("FP8", "FP8")
    check_shape(checkpoint, Parallel(), TrtllmConfig(), BLOCK)
    check_shape(checkpoint, Parallel(), TrtllmConfig(kv_dtype="fp8"), BLOCK)
    with pytest.raises(ConfigError, match="allowed: auto, fp8"):
        check_shape(checkpoint, Parallel(), TrtllmConfig(kv_dtype="bfloat16"), BLOCK)
    halved = checkpoint.kv_block_bytes(BLOCK, "auto")
    assert halved * 2 == read_checkpoint(tmp_path).kv_block_bytes(BLOCK, "bfloat16")


SETTINGS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "section of another engine": (
        {"engine": {"kind": "torch", "trtllm": {"cuda_graph": False}}},
        ["engine.trtllm is for engine kind 'tensorrt_llm', not 'torch'"],
    ),
    "dtype": (
        {"engine": {"kind": "tensorrt_llm", "dtype": "float16"}},
        ["engine.dtype is not for", "use engine.trtllm.dtype"],
    ),
    "step": (
        {"engine": {"kind": "tensorrt_llm", "chunk_tokens": 4096}},
        ["engine.chunk_tokens is not for", "use engine.trtllm.max_num_tokens"],
    ),
    "gpus": (
        {"engine": {"kind": "tensorrt_llm"}, "prefill": {"gpus": 1}},
        ["decode.gpus = 0; allowed: 1"],
    ),
    "unknown key": (
        {"engine": {"kind": "tensorrt_llm", "trtllm": {"max_batch_size": 4}}},
        ["unknown key models[0].variants[0].engine.trtllm.max_batch_size"],
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_contradict_each_other(name: str) -> None:
    variant, parts = SETTINGS[name]
    with pytest.raises(ConfigError) as caught:
        load_config({"models": [{"name": "m", "variants": [{"weights": "w", **variant}]}]})
    for part in parts:
        assert part in caught.value.message
