"""The shipped TensorRT-LLM recipes: valid for us and for its API, clean under `check`, right in figures."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import configs
from serving.config import TrtllmConfig, Variant
from serving.config_review import Level, review
from serving.engine.trtllm.api import load_api
from serving.engine.trtllm.arguments import llm_arguments
from serving.engine.trtllm.checkpoint import check_shape, read_checkpoint
from serving.pool_capacity import Options, PoolCapacity, capacities
from serving.preflight import Plan, read_plan
from serving.quantization import ALGORITHMS, NONE
from tests.fake_trtllm.contract import PROFILES
from tests.fake_trtllm.package import installed
from tests.unit.test_footprint import SHAPES

FOLDER = Path(configs.__file__).parent
RECIPES = sorted(path.stem for path in FOLDER.glob("trtllm-*.yaml"))
CONTRACT = json.loads((Path(__file__).parents[1] / "golden" / "trtllm_api.json").read_text())


def plan_of(recipe: str) -> Plan:
    return read_plan(FOLDER / f"{recipe}.yaml")


def options(recipe: str) -> Options:
    """The shape that the served name says."""
    return Options(shapes={name: SHAPES / f"{name}.json" for name in plan_of(recipe).model_names})


def variants(recipe: str) -> list[Variant]:
    (application,) = plan_of(recipe).applications
    return [variant for model in application.models for variant in model.variants]


def fields_of(name: str) -> dict[str, Any]:
    """(field -> its entry) of a class of the contract, by the end of its qualified name."""
    (found,) = [c for c in CONTRACT["classes"] if c["qualified_name"].endswith(f".{name}")]
    return {field["name"]: field for field in found["fields"]}


def test_there_is_one_for_every_purpose() -> None:
    assert {
        "trtllm-baseline-8b",
        "trtllm-throughput-8b",
        "trtllm-throughput-70b",
        "trtllm-latency-8b",
        "trtllm-latency-70b",
        "trtllm-long-context-70b",
        "trtllm-by-length-8b",
        "trtllm-a100-8b",
    } <= set(RECIPES)
    layouts = {(recipe[-3:], variant.parallel.tensor) for recipe in RECIPES for variant in variants(recipe)}
    assert {("70b", 2), ("70b", 8), ("-8b", 1)} <= layouts
    quantised = {variant.requires.quantization for recipe in RECIPES for variant in variants(recipe)}
    assert {"FP8", "W8A16", "W4A16_AWQ", NONE} <= quantised


@pytest.mark.parametrize("recipe", RECIPES)
def test_our_settings_are_the_engine_s(recipe: str) -> None:
    """Each value of `engine.trtllm` is one that the contract's field of it allows."""
    llm = {**fields_of("BaseLlmArgs"), **fields_of("TorchLlmArgs")}
    kv, transceiver = fields_of("KvCacheConfig"), fields_of("CacheTransceiverConfig")
    for variant in variants(recipe):
        ours = variant.engine.trtllm
        assert ours.kv_dtype in CONTRACT["enums"]["KvCacheConfig.dtype"]
        assert ours.transceiver_runtime in CONTRACT["enums"]["CacheTransceiverConfig.transceiver_runtime"]
        assert {"max_num_tokens", "max_seq_len", "max_batch_size", "enable_chunked_prefill"} <= set(llm)
        assert {"dtype", "free_gpu_memory_fraction", "tokens_per_block", "host_cache_size"} <= set(kv)
        assert {"max_tokens_in_buffer", "kv_transfer_timeout_ms", "backend"} <= set(transceiver)
        assert set(ours.extra) <= set(llm)
        quantization = variant.requires.quantization
        assert quantization == NONE or quantization in CONTRACT["enums"]["tensorrt_llm.llmapi.QuantAlgo"]


@pytest.mark.parametrize("version", PROFILES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_adapter_accepts_it(recipe: str, version: str, tmp_path: Path) -> None:
    """From settings to `LLM(...)` of both versions, as a fake built from the contract takes it."""
    (application,) = plan_of(recipe).applications
    with installed(version) as package:
        api = load_api()
        for model in application.models:
            (tmp_path / "config.json").write_text((SHAPES / f"{model.name}.json").read_text())
            checkpoint = read_checkpoint(tmp_path)
            for variant in model.variants:
                engine = variant.engine
                check_shape(checkpoint, variant.parallel, engine.trtllm, engine.block_tokens)
                for role in ("prefill", "decode"):
                    package.LLM(**llm_arguments(api, engine, variant.parallel, role, checkpoint)).shutdown()


@pytest.mark.parametrize("recipe", RECIPES)
def test_check_has_nothing_to_say(recipe: str) -> None:
    """But what the recipe itself says: INT8 is not in the engine's matrix."""
    found = review(plan_of(recipe), options(recipe))
    assert [f.problem for f in found if not f.problem.startswith("W8A16 is not in")] == []
    assert all(f.level is Level.WARNING for f in found)


def pools(recipe: str) -> list[PoolCapacity]:
    return list(capacities(plan_of(recipe), options(recipe)))


@pytest.mark.parametrize("recipe", RECIPES)
def test_memory_is_where_it_should_be(recipe: str) -> None:
    """85 to 92 % of each card; a full batch of the p99 length fits with 20 % head-room."""
    for pool in pools(recipe):
        memory = pool.capacity.memory
        assert memory is not None
        assert 0.85 <= memory.used_share <= 0.92, (pool.variant, memory.used_share)
        assert pool.capacity.binds == "max_batch"
        assert pool.capacity.enough


@pytest.mark.parametrize("recipe", RECIPES)
def test_targets_are_within_bandwidth(recipe: str) -> None:
    (application,) = plan_of(recipe).applications
    targets = {model.name: model.slo.itl_ms for model in application.models}
    for pool in pools(recipe):
        assert pool.capacity.step_floor_ms is not None
        assert pool.capacity.step_floor_ms < targets[pool.model]


@pytest.mark.parametrize("recipe", RECIPES)
def test_quantised_kv_is_for_short_prompts(recipe: str) -> None:
    for variant in variants(recipe):
        longest = variant.engine.trtllm.max_seq_len
        assert longest is not None
        if variant.engine.trtllm.kv_dtype in ("fp8", "nvfp4"):
            assert longest <= 8192


def test_a_prompt_of_any_length_has_one_lane() -> None:
    """trtllm-by-length: no gap, no overlap, and the longest answer fits beside the longest prompt."""
    long, short = variants("trtllm-by-length-8b")
    assert short.prompt_tokens.min == 1
    assert short.prompt_tokens.max is not None
    assert long.prompt_tokens.min == short.prompt_tokens.max + 1
    for variant in (long, short):
        context = variant.engine.trtllm.max_seq_len
        assert context is not None
        assert variant.prompt_tokens.max is not None
        assert context - variant.prompt_tokens.max >= 1024


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_read_like_a_page(recipe: str) -> None:
    """It begins with what it is for, names its command, and gives a reason for what is not a default."""
    text = (FOLDER / f"{recipe}.yaml").read_text()
    head = text.split("proxy_location")[0].splitlines()
    assert head[0].startswith("# TensorRT-LLM, ")
    assert any(f"kvrelay capacity {recipe}" in line for line in head)
    assert max(len(line) for line in text.splitlines()) <= 120
    unusual = [name for name in TrtllmConfig.__struct_fields__ if re.search(rf"^ +{name}:.*#", text, re.M)]
    assert unusual, "no setting has a reason"
    assert yaml.safe_load(text)["applications"][0]["import_path"] == "serving.app:build"


def test_the_contract_names_our_algorithms() -> None:
    assert set(ALGORITHMS) <= set(CONTRACT["enums"]["tensorrt_llm.llmapi.QuantAlgo"])
