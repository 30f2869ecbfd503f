"""One application with many models, real and tiny, split and whole; it ends before others start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serving.local_cluster import LocalCluster
from serving.manifest import resolve_weights
from tests.serve.client import Client
from tests.serve.metrics import Scrape
from tests.tiny_tokenizer import save_tiny_tokenizer, tiny_tokenizer
from tests.unit.tiny_models import SHAPES, save_tiny_model

REAL = "smollm2-135m"
AGGREGATED = "-aggregated"  # the same weights without prefill workers
TINY_CONTEXT = 2048


def variant(weights: str | Path, *, prefill: int, **engine: Any) -> dict[str, Any]:
    pool = {"min_replicas": 0, "cpus": 0.1}
    return {
        "weights": str(weights),
        "engine": engine,
        "prefill": {**pool, "replicas": prefill},
        "decode": {**pool, "replicas": 1},
    }


def both_ways(name: str, weights: str | Path, **engine: Any) -> list[dict[str, Any]]:
    """The model disaggregated, and aggregated beside it."""
    return [
        {"name": name, "variants": [variant(weights, prefill=1, **engine)]},
        {"name": name + AGGREGATED, "variants": [variant(weights, prefill=0, **engine)]},
    ]


@pytest.fixture(scope="session")
def tiny_directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two-layer models of every shape, with a tokenizer of their own."""
    root = tmp_path_factory.mktemp("tiny")
    directories = {}
    for shape in SHAPES:
        vocab = tiny_tokenizer().vocab_size
        directory = save_tiny_model(
            root / shape, shape, vocab_size=vocab, max_position_embeddings=TINY_CONTEXT
        )
        save_tiny_tokenizer(directory)
        directories[shape] = directory
    return directories


@pytest.fixture(scope="package")
def cluster(tiny_directories: dict[str, Path]) -> Iterator[LocalCluster]:
    resolve_weights(REAL)
    torch = {"kind": "torch", "dtype": "float32", "block_tokens": 32, "max_batch": 16, "threads": 1}
    models = both_ways(REAL, REAL, **torch, kv_bytes=1 << 30)
    for shape, directory in tiny_directories.items():
        models += both_ways(shape, directory, **torch, kv_bytes=16 << 20)
    sim = {
        "kind": "sim",
        "profile": {"step_ms": 4, "prefill_ms_per_token": 0.1, "kv_bytes_per_token": 1024},
        "kv_bytes": 32 << 20,
        "chunk_tokens": 64,
        "block_tokens": 16,
    }
    models.append({"name": "sim", "variants": [variant(REAL, prefill=1, **sim)]})
    config = {
        "proxy_location": "HeadOnly",
        "logging_config": {"enable_access_log": False},
        "applications": [
            {
                "name": "llm",
                "route_prefix": "/",
                "import_path": "serving.app:build",
                "external_scaler_enabled": True,
                "args": {
                    "models": models,
                    "frontend": {"replicas": 2},
                    # Every request is handed over: whether that pays is the router's tests' question.
                    "router": {"local_prefill": False},
                    # What a slow machine takes is not a fault here, and canaries would be counted as work.
                    "admission": {"mode": "off"},
                    "deadlines": {"silence_ms": 60_000},
                    "health": {"canary_s": 0},
                },
            }
        ],
    }
    with LocalCluster(cpus=8) as cluster:
        cluster.serve(config, timeout_s=400)
        yield cluster


@pytest.fixture
def client(cluster: LocalCluster) -> Client:
    return Client(cluster.url)


@pytest.fixture
def scrape(client: Client) -> Scrape:
    return Scrape(client)
