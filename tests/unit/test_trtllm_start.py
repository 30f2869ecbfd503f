"""The start of a TensorRT-LLM engine: its place, what it can do, and one line for what is missing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serving.config import EngineConfig, Parallel, TrtllmConfig
from serving.engine.trtllm.api import load_api
from serving.engine.trtllm.build import build_trtllm_engine
from serving.engine.trtllm.placement import check_node, ray_placement, reserved
from serving.errors import ConfigError, StartError
from tests.fake_trtllm.contract import Contract
from tests.fake_trtllm.package import installed
from tests.unit.trtllm_rig import engine_config, running, save_model

# ---------------------------------------------------------------- the start


def test_without_the_package_one_line_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"'tensorrt_llm', which is not installed.*kvrelay\[tensorrt\]"):
        build_trtllm_engine(engine_config(), save_model(tmp_path), Parallel(), "decode")


def test_an_import_that_breaks_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise OSError("libcuda.so.1: cannot open shared object file\nNo such file")

    monkeypatch.setattr("serving.engine.trtllm.api.importlib.import_module", broken)
    with pytest.raises(StartError) as caught:
        load_api()
    assert "libcuda.so.1" in caught.value.message
    assert "\n" not in caught.value.message


def test_an_engine_that_dies_at_its_start_is_one_line(tmp_path: Path) -> None:
    save_model(tmp_path)
    with installed("main") as package:
        error = RuntimeError("CUDA out of memory.\nTried to allocate 2.00 GiB")

        def dies(self: Any, *args: Any, **kwargs: Any) -> None:
            raise error

        package.LLM.__init__ = dies
        dies.__signature__ = Contract("main").signature("LLM", "__init__")  # type: ignore[attr-defined]
        with pytest.raises(StartError) as caught:
            build_trtllm_engine(engine_config(), tmp_path, Parallel(), "decode")
    assert "does not start" in caught.value.message
    assert "CUDA out of memory. Tried" in caught.value.message
    assert "\n" not in caught.value.message


def test_a_checkpoint_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"config\.json"):
        build_trtllm_engine(engine_config(), tmp_path, Parallel(), "decode")


# ---------------------------------------------------------------- placement


def test_mpi_takes_one_bundle_and_ray_one_a_rank() -> None:
    from serving.config import PoolConfig

    pool = PoolConfig(cpus=4, gpus=4, labels={"gpu": "h200"})
    options, group = reserved(pool, Parallel(2, 2), "mpi")
    assert options == {"num_cpus": 4, "num_gpus": 4}
    assert group == {}
    options, group = reserved(pool, Parallel(2, 2), "ray")
    assert options == {"num_cpus": 4, "num_gpus": 0}
    assert group["placement_group_bundles"] == [{"CPU": 4}] + [{"GPU": 1}] * 4
    assert group["placement_group_strategy"] == "PACK"
    assert group["placement_group_bundle_label_selector"] == [{"gpu": "h200"}] * 5


def test_ranks_take_bundles_of_the_replicas_own_group() -> None:
    """ray 59064, vllm 29688: a group nested in a replica is placed anywhere, or never."""

    group = SimpleNamespace(bundle_specs=[{"CPU": 4.0}, {"GPU": 1.0}, {"GPU": 1.0}])
    assert ray_placement(group) == {
        "placement_groups": [group],
        "placement_bundle_indices": [[1, 2]],
        "per_worker_gpu_share": 1.0,
    }
    with pytest.raises(StartError, match="placement group"):
        ray_placement(None)


def test_a_node_without_what_the_engine_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    check_node(Parallel(), "mpi", 1)
    check_node(Parallel(), "mpi", None)
    with pytest.raises(ConfigError, match=r"= 4; this worker has 1 GPUs.*orchestrator: ray"):
        check_node(Parallel(2, 2), "mpi", 1)
    usage = type("Usage", (), {"total": 64 << 20})()
    monkeypatch.setattr("serving.engine.trtllm.placement.shutil.disk_usage", lambda path: usage)
    check_node(Parallel(), "mpi", 1)  # one rank exchanges nothing
    with pytest.raises(StartError, match=r"/dev/shm has 64 MiB; 2 GPUs.*1024 MiB.*--shm-size"):
        check_node(Parallel(2), "ray", None)


def test_capabilities_say_what_falls_back(tmp_path: Path) -> None:
    with running("main", tmp_path) as heard:
        can = heard.engine.capabilities
        assert can.moves_kv
        lacks = (can.streamed_handoff, can.seeded_resume, can.migrate_kv, can.block_states)
        assert lacks == (False,) * 4
        assert not can.guided  # without a backend
    config = EngineConfig(kind="tensorrt_llm", trtllm=TrtllmConfig(guided_backend="llguidance"))
    from serving.engine.trtllm.capabilities import capabilities_of

    assert capabilities_of(config.trtllm).guided
