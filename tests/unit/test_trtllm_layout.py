"""The layout of TensorRT-LLM's KV: the shapes of both pools are in it, whichever pool a worker is of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from serving.config import EngineConfig, Parallel, PoolConfig, TrtllmConfig, Variant
from serving.engine.factory import build_engine
from serving.engine.trtllm import build
from serving.engine.trtllm.api import load_api
from serving.engine.trtllm.checkpoint import read_checkpoint
from serving.engine.trtllm.layout import layout_of
from tests.fake_trtllm.package import installed
from tests.unit.trtllm_rig import save_model

ONE, TWO = Parallel(tensor=1), Parallel(tensor=2)


def layouts(
    monkeypatch: pytest.MonkeyPatch, directory: Path, prefill: Parallel | None, decode: Parallel | None
) -> list[str]:
    """Of a prefill and a decode worker of a variant, by the factory's own way to the engine."""
    found = []

    def engine(
        config: EngineConfig, where: Path, parallel: Parallel, role: str, *, topology: str, **rest: Any
    ) -> None:
        assert parallel == ({"prefill": prefill, "decode": decode}[role] or Parallel())
        with installed("main"):
            found.append(layout_of(load_api(), config, read_checkpoint(where), "digest", topology))

    monkeypatch.setattr(build, "build_trtllm_engine", engine)
    variant = Variant(
        weights=str(directory),
        engine=EngineConfig(kind="tensorrt_llm", trtllm=TrtllmConfig(topology_pairs=["tp2pp1>tp1pp1"])),
        prefill=PoolConfig(parallel=prefill),
        decode=PoolConfig(parallel=decode),
    )
    for role in ("prefill", "decode"):
        build_engine(variant, role)
    return found


def test_pools_of_a_compared_pair_have_one_layout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    save_model(tmp_path)
    (layout,) = set(layouts(monkeypatch, tmp_path, TWO, ONE))
    assert len(layout) == 16


def test_a_rollout_to_other_shapes_pairs_no_old_worker_with_a_new_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save_model(tmp_path)
    shapes = [(None, None), (TWO, TWO), (TWO, ONE), (ONE, TWO)]
    found = [layouts(monkeypatch, tmp_path, *pools) for pools in shapes]
    assert len({layout for pair in found for layout in pair}) == len(shapes)
    assert layouts(monkeypatch, tmp_path, ONE, ONE) == found[0]
