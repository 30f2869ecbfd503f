"""Provenance: what a worker says it serves, that a wrong place is refused, and where the world sees it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from serving.config import Variant, load_config
from serving.errors import StartError
from serving.gpu_probe import Device, GpuState, probe
from serving.provenance import Provenance, merged, provenance_of, settings_digest
from tests.scripted import Client
from tests.unit.app_rig import PROVENANCE, App
from tests.unit.test_application import scrape, total
from tests.unit.test_model_shape import SMALL

H200 = GpuState((Device("NVIDIA H200", 143_771 << 20),) * 2, "13.0", "580.95.05")
H100 = GpuState((Device("NVIDIA H100 80GB HBM3", 81_559 << 20),), "12.8", "570.10")
NEW = GpuState((Device("NVIDIA X900", 1 << 40),), "14.0", "700.1")


def variant(**settings: Any) -> Variant:
    """Of a valid configuration: pools reserve the GPUs that their layout takes."""
    settings.setdefault("engine", {"kind": "tensorrt_llm"})
    for role in ("prefill", "decode"):
        pool = settings.setdefault(role, {})
        layout = {**(pool.get("parallel") or settings.get("parallel") or {})}
        pool.setdefault("gpus", layout.get("tensor", 1) * layout.get("pipeline", 1))
    args = {"models": [{"name": "m", "variants": [{"weights": "w", **settings}]}]}
    return load_config(args).models[0].variants[0]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A checkpoint of ModelOpt, FP8 with FP8 KV."""
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}" + bytes(range(256)))
    return tmp_path


def said(spec: Variant, weights: Path, state: GpuState = H200, role: str = "decode") -> Provenance:
    return provenance_of(spec, role, weights, ask=lambda: state)


def test_what_a_gpu_worker_says(weights: Path) -> None:
    engine = {"kind": "tensorrt_llm", "trtllm": {"topology_pairs": ["tp2pp1>tp1pp2"]}}
    layout = {"tensor": 1, "pipeline": 2}
    spec = variant(engine=engine, parallel={"tensor": 2}, decode={"parallel": layout})
    found = said(spec, weights)
    assert found.engine_version == "tensorrt_llm unknown"  # not installed here
    assert (found.gpu, found.cuda, found.driver) == ("H200-141", "13.0", "580.95.05")
    assert (found.quantization, found.kv_dtype) == ("FP8", "fp8")
    assert found.parallel == "tp1pp2"
    assert said(spec, weights, role="prefill").parallel == "tp2pp1"
    assert len(found.weights_digest) == 32


def test_what_a_cpu_worker_says(weights: Path) -> None:
    found = said(variant(engine={"kind": "torch", "dtype": "float32"}), weights)
    assert found.engine_version.startswith("torch 2.")
    assert "transformers" in found.engine_version
    assert (found.gpu, found.cuda, found.driver, found.kv_dtype) == ("cpu", "cpu", "cpu", "float32")


def test_a_model_whose_shape_nobody_knows_is_no_reason_to_refuse(weights: Path) -> None:
    (weights / "config.json").write_text(json.dumps({"model_type": "mamba", "dtype": "float16"}))
    (weights / "hf_quant_config.json").unlink()
    found = said(variant(), weights)
    assert (found.quantization, found.kv_dtype) == ("NO_QUANT", "float16")


ALLOWED: dict[str, tuple[dict[str, Any], GpuState]] = {
    "nothing required": ({}, H100),
    "the GPU": ({"gpu": "H200"}, H200),
    "the GPU, in full": ({"gpu": "H200-141"}, H200),
    "a GPU of no catalogue": ({"gpu": "X900"}, NEW),
    "the quantisation": ({"quantization": "fp8"}, H200),
}


@pytest.mark.parametrize(("requires", "state"), ALLOWED.values(), ids=ALLOWED)
def test_a_worker_in_its_place(weights: Path, requires: dict[str, Any], state: GpuState) -> None:
    said(variant(requires=requires), weights, state)


REFUSED: dict[str, tuple[dict[str, Any], GpuState, str]] = {
    "another GPU": (
        {"gpu": "H200"},
        H100,
        "variant 'main': requires.gpu = 'H200'; this worker has: NVIDIA H100 80GB HBM3",
    ),
    "one of two is another": (
        {"gpu": "H200"},
        GpuState(H200.devices + H100.devices),
        "requires.gpu = 'H200'; this worker has: NVIDIA H100",
    ),
    "less memory": (
        {"gpu": "H200"},
        GpuState((Device("NVIDIA H200", 70 << 30),)),
        "requires.gpu = 'H200'; this worker has: NVIDIA H200",
    ),
    "no GPU": ({"gpu": "H200"}, GpuState(), "requires.gpu = 'H200'; this worker has no GPU"),
    "another quantisation": (
        {"quantization": "NO_QUANT"},
        H200,
        "requires.quantization = 'NO_QUANT'; these weights are FP8",
    ),
    "other weights": (
        {"weights_digest": "a" * 32},
        H200,
        f"requires.weights_digest = {'a' * 32}; these weights are ",
    ),
}


@pytest.mark.parametrize(("requires", "state", "message"), REFUSED.values(), ids=REFUSED)
def test_a_worker_in_the_wrong_place(
    weights: Path, requires: dict[str, Any], state: GpuState, message: str
) -> None:
    with pytest.raises(StartError) as caught:
        said(variant(requires=requires), weights, state)
    assert message in caught.value.message
    assert "\n" not in caught.value.message


def test_a_pinned_digest(weights: Path) -> None:
    digest = said(variant(), weights).weights_digest
    said(variant(requires={"weights_digest": digest}), weights)
    (weights / "model.safetensors").write_bytes(
        b"\x02\0\0\0\0\0\0\0{}" + bytes(256)
    )  # same size and header
    with pytest.raises(StartError, match="these weights are"):
        said(variant(requires={"weights_digest": digest}), weights)


CHANGES: dict[str, tuple[dict[str, Any], bool]] = {
    "batch": ({"engine": {"kind": "tensorrt_llm", "max_batch": 3}}, True),
    "KV dtype": ({"engine": {"kind": "tensorrt_llm", "trtllm": {"kv_dtype": "fp8"}}}, True),
    "layout": ({"parallel": {"tensor": 2}}, True),
    "prompts": ({"prompt_tokens": {"max": 10}}, True),
    "replicas": ({"decode": {"replicas": 3}}, False),
    "place of the weights": ({"weights": "/elsewhere"}, False),
}


@pytest.mark.parametrize(("change", "differs"), CHANGES.values(), ids=CHANGES)
def test_the_digest_of_the_settings(change: dict[str, Any], differs: bool) -> None:
    assert (settings_digest(variant(**change)) != settings_digest(variant())) == differs


def test_equal_workers_are_one_entry() -> None:
    a, b = {"engine": "torch"}, {"engine": "sim"}
    found = merged(
        [("main", "prefill", a), ("main", "decode", a), ("main", "decode", a), ("new", "decode", b)]
    )
    assert found == [
        {"variant": "main", "engine": "torch", "workers": {"prefill": 1, "decode": 2}},
        {"variant": "new", "engine": "sim", "workers": {"decode": 1}},
    ]


async def test_models_and_metrics_tell_it() -> None:
    async with App(decode=2) as app:
        reply = await Client(app.frontends[0].api).send("GET", "/v1/models")
        (model,) = reply.json["data"]
        expected = {
            "variant": "main",
            **msgspec.to_builtins(PROVENANCE),
            "workers": {"prefill": 1, "decode": 2},
        }
        assert model["kvrelay"] == {"variants": [expected]}
        one = await Client(app.frontends[0].api).send("GET", "/v1/models/tiny")
        assert one.json["kvrelay"] == model["kvrelay"]
        assert total(await scrape(app), "variant_info", "engine=sim") == 3


# ---------------------------------------------------------------- asking the driver


def test_a_machine_without_a_driver(tmp_path: Path) -> None:
    assert probe("libno-such-library.so", tmp_path / "none") == GpuState()


DRIVER_FILES: dict[str, tuple[str, str | None]] = {
    "open": (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (d)  Tue\n"
        "GCC version:  gcc version 12.3.0 (Ubuntu)\n",
        "580.95.05",
    ),
    "closed": ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Sat Feb 24\n", "535.161.08"),
    "something else": ("nothing\n", None),
}


@pytest.mark.parametrize(("text", "expected"), DRIVER_FILES.values(), ids=DRIVER_FILES)
def test_the_driver_s_version(tmp_path: Path, text: str, expected: str | None) -> None:
    file = tmp_path / "version"
    file.write_text(text)
    assert probe("libno-such-library.so", file).driver == expected


def test_nothing_is_asked_for_a_cpu_engine(weights: Path) -> None:
    asked: Callable[[], GpuState] = lambda: pytest.fail("asked")  # noqa: E731
    provenance_of(variant(engine={"kind": "torch"}), "decode", weights, ask=asked)
