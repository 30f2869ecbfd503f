"""config.json to shape: what is read, every wrong one told in one line; checkpoints that differ from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from serving.checkpoint import verify_checkpoint
from serving.errors import ConfigError
from serving.model_shape import Experts, Latent, parse_shape, read_shape
from tests.unit.tiny_models import save_tiny_model

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 1024,
}


def parse(**changes: Any) -> Any:
    """`...` takes a key away."""
    config = {key: value for key, value in {**SMALL, **changes}.items() if value is not ...}
    return parse_shape(config, "config.json")


def test_grouped_query_attention() -> None:
    shape = parse()
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.full_layers) == (8, 2, 8, 6)
    assert shape.kv_values_per_layer == 2 * 2 * 8
    assert parse(num_key_value_heads=...).kv_heads == 8
    assert parse(head_dim=32).head_dim == 32


EXPERTS = {
    "mixtral": ({"num_local_experts": 8, "num_experts_per_tok": 2}, Experts(8, 2, 128, 0, 6)),
    "qwen3": (
        {
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 32,
            "decoder_sparse_step": 1,
        },
        Experts(16, 4, 32, 0, 6),
    ),
    "qwen2, every second layer, one dense": (
        {
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 96,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [5],
        },
        Experts(16, 4, 32, 96, 2),
    ),
    "deepseek": (
        {
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 32,
            "n_shared_experts": 2,
            "first_k_dense_replace": 3,
        },
        Experts(16, 4, 32, 64, 3),
    ),
}


@pytest.mark.parametrize(("config", "expected"), EXPERTS.values(), ids=EXPERTS)
def test_experts(config: dict[str, Any], expected: Experts) -> None:
    assert parse(**config).experts == expected


def test_latent_attention() -> None:
    shape = parse(q_lora_rank=None, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8)
    assert shape.latent == Latent(None, 16, 4, 8, 8)
    assert shape.kv_values_per_layer == 20


WINDOWS = {
    "none": ({}, (None, 0)),
    "all layers": ({"sliding_window": 256}, (256, 6)),
    "as long as the context": ({"sliding_window": 1024}, (None, 0)),
    "switched off": ({"sliding_window": 256, "use_sliding_window": False}, (None, 0)),
    "named": (
        {"sliding_window": 256, "layer_types": ["sliding_attention"] * 4 + ["full_attention"] * 2},
        (256, 4),
    ),
    "a pattern": ({"sliding_window": 256, "sliding_window_pattern": 3}, (256, 4)),
    "gemma2, every second": ({"sliding_window": 256, "model_type": "gemma2"}, (256, 3)),
    "qwen2, the last ones": (
        {"sliding_window": 256, "model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 4},
        (256, 2),
    ),
}


@pytest.mark.parametrize(("config", "expected"), WINDOWS.values(), ids=WINDOWS)
def test_windows(config: dict[str, Any], expected: tuple[int | None, int]) -> None:
    shape = parse(**config)
    assert (shape.window_tokens, shape.window_layers) == expected


QUANTISED = {
    "none": ({}, None, (None, None)),
    "one that nobody knows": ({"quant_method": "magic"}, None, ("magic", None)),
    "fp8": ({"quant_method": "fp8"}, None, ("FP8", None)),
    "fp8 blocks": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        None,
        ("FP8_BLOCK_SCALES", None),
    ),
    "awq": ({"quant_method": "awq", "bits": 4}, None, ("W4A16_AWQ", None)),
    "gptq 8": ({"quant_method": "gptq", "bits": 8}, None, ("W8A16_GPTQ", None)),
    "mxfp4": ({"quant_method": "mxfp4"}, None, ("W4A16_MXFP4", None)),
    "compressed int8": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": 8}}},
        },
        None,
        ("W8A16", None),
    ),
    "modelopt": (None, {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, ("FP8", "fp8")),
    "modelopt, KV alone": (None, {"quant_algo": None, "kv_cache_quant_algo": "FP8"}, (None, "fp8")),
}


@pytest.mark.parametrize(("config", "modelopt", "expected"), QUANTISED.values(), ids=QUANTISED)
def test_quantisation(tmp_path: Path, config: Any, modelopt: Any, expected: tuple[str, str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "quantization_config": config}))
    if modelopt is not None:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": modelopt}))
    shape = read_shape(tmp_path)
    assert (shape.quantization, shape.kv_quantization) == expected


def test_the_language_part_of_a_multimodal_model() -> None:
    assert parse_shape({"model_type": "llava", "text_config": SMALL}, "c").layers == 6


BAD = {
    "no layers": ({"num_hidden_layers": ...}, "no num_hidden_layers"),
    "no context": ({"max_position_embeddings": ...}, "no max_position_embeddings"),
    "text for a number": ({"hidden_size": "64"}, "hidden_size = '64'; allowed: a whole number, 1 or more"),
    "zero": ({"num_attention_heads": 0}, "num_attention_heads = 0"),
    "true": ({"vocab_size": True}, "vocab_size = True"),
    "KV heads": ({"num_key_value_heads": 3}, "num_key_value_heads = 3 does not divide 8 heads"),
    "odd width": ({"hidden_size": 65}, "8 heads do not divide hidden_size = 65"),
    "dtype": ({"torch_dtype": "int3"}, "dtype = 'int3'; allowed: float32, bfloat16"),
    "half of MLA": ({"kv_lora_rank": 16}, "no qk_rope_head_dim"),
    "experts without a count": ({"num_local_experts": 8}, "no num_experts_per_tok"),
    "a kind of layer": ({"layer_types": ["linear_attention"] * 6}, "layer_types has 'linear_attention'"),
    "too few kinds": ({"layer_types": ["full_attention"]}, "1 layer_types for 6 layers"),
}


@pytest.mark.parametrize(("changes", "said"), BAD.values(), ids=BAD)
def test_a_wrong_config_is_told_in_one_line(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(**changes)
    assert caught.value.message.startswith("config.json: ")
    assert said in caught.value.message
    assert "\n" not in caught.value.message


FILES = {
    "no file": (None, "cannot be read"),
    "no JSON": ("{", "not JSON"),
    "a list": ("[]", "not a JSON object"),
}


@pytest.mark.parametrize(("text", "said"), FILES.values(), ids=FILES)
def test_a_file_that_is_no_config(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_shape(tmp_path / "config.json")
    assert said in caught.value.message
    assert "\n" not in caught.value.message


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_checkpoint_that_agrees(tmp_path: Path, kind: str) -> None:
    save_tiny_model(tmp_path, kind)
    verify_checkpoint(tmp_path, read_shape(tmp_path))


CONTRADICTIONS = {
    "layers": (
        {"num_hidden_layers": 4},
        "the weights have 2 layers and config.json says num_hidden_layers = 4",
    ),
    "vocabulary": ({"vocab_size": 640}, "embed_tokens.weight is 320 x 48; config.json says 640 x 48"),
    "KV heads": ({"num_key_value_heads": 3}, "k_proj.weight is 16 x 48; config.json says 24 x 48"),
    "heads": ({"num_attention_heads": 8}, "q_proj.weight is 48 x 48; config.json says 64 x 48"),
    "MLP": ({"intermediate_size": 128}, "up_proj.weight is 96 x 48; config.json says 128 x 48"),
}


@pytest.mark.parametrize(("changes", "said"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_a_checkpoint_that_contradicts(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    save_tiny_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ConfigError) as caught:
        verify_checkpoint(tmp_path, read_shape(tmp_path))
    assert said in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("content", [b"", b"\xff" * 16, b"\x02\0\0\0\0\0\0\0[]"])
def test_a_file_that_is_no_safetensors(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="not a safetensors file"):
        verify_checkpoint(tmp_path, parse())
