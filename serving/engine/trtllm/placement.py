"""Where an engine's GPUs come from, and whether this node has what they need.

`mpi`: all GPUs of one engine on one node, as one bundle of the replica's actor. `ray`: a bundle a GPU, over
nodes if need be, out of the replica's own placement group. Pure but for a look at /dev/shm.
"""

from __future__ import annotations

import shutil
from typing import Any

from serving.config import Parallel, PoolConfig
from serving.errors import ConfigError, StartError

SHARED_MEMORY = "/dev/shm"  # NCCL and the ranks of one engine exchange buffers there
SHARED_BYTES = 1 << 30


def world_size(parallel: Parallel) -> int:
    return parallel.tensor * parallel.pipeline


def reserved(
    pool: PoolConfig, parallel: Parallel, orchestrator: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a replica reserves for its one engine: options of its actor, and of its placement group."""
    world = world_size(parallel)
    if orchestrator == "mpi":
        return {"num_cpus": pool.cpus, "num_gpus": world}, {}
    bundles = [{"CPU": pool.cpus}] + [{"GPU": 1}] * world  # the actor's own, then one a rank
    selectors = [dict(pool.labels)] * len(bundles)
    return {"num_cpus": pool.cpus, "num_gpus": 0}, {
        "placement_group_bundles": bundles,
        "placement_group_strategy": "PACK",
        **({"placement_group_bundle_label_selector": selectors} if pool.labels else {}),
    }


def ray_placement(group: Any) -> dict[str, Any]:
    """For `LLM(ray_placement_config=...)`: the ranks' bundles out of the replica's own placement group.

    Raises StartError without one: workers that reserved nothing would take GPUs of others.
    """
    if group is None:
        raise StartError(
            "engine.trtllm.orchestrator = 'ray' needs the replica's placement group: none here"
        )
    ranks = list(range(1, len(group.bundle_specs)))
    return {
        "placement_groups": [group],
        "placement_bundle_indices": [ranks],
        "per_worker_gpu_share": 1.0,
    }


def check_node(parallel: Parallel, orchestrator: str, gpus: int | None) -> None:
    """Raises ConfigError or StartError, one line, for what would only fail much later."""
    world = world_size(parallel)
    if orchestrator == "mpi" and gpus is not None and gpus < world:
        raise ConfigError(
            f"parallel.tensor x parallel.pipeline = {world}; this worker has {gpus} GPUs: give its pool "
            f"gpus: {world}, on nodes that have so many, or use engine.trtllm.orchestrator: ray"
        )
    if world > 1:
        try:
            total = shutil.disk_usage(SHARED_MEMORY).total
        except OSError as error:
            raise StartError(f"{SHARED_MEMORY} is not there ({error}): {world} GPUs need it") from error
        if total < SHARED_BYTES:
            raise StartError(
                f"{SHARED_MEMORY} has {total >> 20} MiB; {world} GPUs of one engine need "
                f"{SHARED_BYTES >> 20} MiB or more (docker: --shm-size, Kubernetes: an emptyDir of Memory)"
            )
