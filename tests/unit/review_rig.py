"""Configurations with nothing to find but what a test sets, and what a review finds in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from serving.config import load_config
from serving.config_review import Finding, Level, review
from serving.pool_capacity import Options
from serving.preflight import Plan
from tests.unit.test_footprint import SHAPES

LLAMA_8B = Options(gpu="H100-80", shapes={"": SHAPES / "llama-3.1-8b.json"})
E, W, N = Level.ERROR, Level.WARNING, Level.NOTE


def trtllm(*, model: str = "m", slo: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    """A variant with nothing to find, but for `settings`; `engine` and `trtllm` are merged."""
    ours = {"max_seq_len": 8192, "free_gpu_memory_fraction": 0.85, **settings.pop("trtllm", {})}
    engine = {"kind": "tensorrt_llm", "max_batch": 76, **settings.pop("engine", {}), "trtllm": ours}
    layout = settings.get("parallel", {})
    gpus = layout.get("tensor", 1) * layout.get("pipeline", 1)
    pools = {"prefill": {"gpus": gpus}, "decode": {"gpus": gpus}}
    variant = {"weights": "/no/such/model", "engine": engine, **pools, **settings}
    return {"models": [{"name": model, "variants": [variant], "slo": slo or {}}]}


def torch(**settings: Any) -> dict[str, Any]:
    engine = {"kind": "torch", "kv_bytes": 2 << 30, **settings.pop("engine", {})}
    return {
        "models": [{"name": "m", "variants": [{"weights": "/no/such/model", "engine": engine, **settings}]}]
    }


def sim(**engine: Any) -> dict[str, Any]:
    profile = {"context_tokens": 1024, "kv_bytes_per_token": 64}
    engine = {"kind": "sim", "profile": profile, "kv_bytes": 1 << 22, **engine}
    return {"models": [{"name": "m", "variants": [{"weights": "w", "engine": engine}]}]}


def found(args: dict[str, Any], options: Options = LLAMA_8B) -> list[Finding]:
    return review(Plan(Path("serve.yaml"), {}, (load_config(args),)), options)


def shape(name: str, gpu: str = "H100-80") -> Options:
    return Options(gpu=gpu, shapes={"": SHAPES / f"{name}.json"})


def yaml_file(path: Path, args: dict[str, Any]) -> str:
    application = {"name": "a", "import_path": "serving.app:build", "args": args}
    path.write_text(json.dumps({"applications": [application]}))  # JSON is YAML
    return str(path)
