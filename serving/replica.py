"""What every replica does with Ray: who and where it is, and what Serve says of the others."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable

import ray
from ray import serve
from ray._private.worker import global_worker
from ray.serve._private.constants import RAY_SERVE_ENABLE_HA_PROXY, RAY_SERVE_THROUGHPUT_OPTIMIZED
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from serving import registry
from serving.config import LinkConfig
from serving.json_lines import JsonLines
from serving.link import Identity
from serving.registry import Members

# On every deployment that others must find.
FOUND_BY_MEMBERS = RequestRouterConfig(
    request_router_class="serving.membership_router:MembershipRouter", request_routing_stats_period_s=3600
)


def replica_identity(kind: str, config: LinkConfig) -> Identity:
    """Named as Serve names the replica; the epoch is fresh per process."""
    return Identity.fresh(kind, serve.get_replica_context().replica_id.unique_id, config.wire_version)


def application_name() -> str:
    return str(serve.get_replica_context().app_name)


def link_host(config: LinkConfig) -> str:
    """The interface that links bind: as configured, else the node's own address in the cluster."""
    return config.host or str(ray.util.get_node_ip_address())


def warn_without_flags() -> None:
    """Once per frontend: the same application works on Serve's own proxy, at a price."""
    if not (RAY_SERVE_ENABLE_HA_PROXY and RAY_SERVE_THROUGHPUT_OPTIMIZED):
        logging.getLogger("kvrelay.frontend").warning(
            "Ray was started without RAY_SERVE_ENABLE_HA_PROXY=1 and RAY_SERVE_THROUGHPUT_OPTIMIZED=1: "
            "a token costs about ten times the CPU, the first comes 10 ms later (see `kvrelay env`)"
        )


def warn_if_nice(log: logging.Logger) -> None:
    """Once per frontend and worker: Ray's processes start at niceness 0 and, by default, serve at 15."""
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    if niceness > 0:
        log.warning(
            "Ray was started without RAY_worker_niceness=0: this replica serves at niceness %d, and on a "
            "busy machine it waits for whatever starts there (see `kvrelay env`)",
            niceness,
        )


def refuse_while_leaving() -> None:
    """For `check_health`: raises RuntimeError once Serve has told this replica to stop.

    Serve's controller forgets that when it dies: its successor would take the replica for one that runs,
    stop a healthy one in its place, and never notice that this one has ended. Serve asks none that it knows
    to be stopping.
    """
    if global_worker.actors[global_worker.actor_id]._replica_impl._shutting_down:
        raise RuntimeError("Serve has told this replica to stop")


def follow_members(handle: DeploymentHandle, on_members: Callable[[Members], None]) -> None:
    """Call `on_members` on this loop with every member list of the handle's deployment."""
    loop = asyncio.get_running_loop()

    def publish(members: Members) -> None:
        loop.call_soon_threadsafe(on_members, members)

    registry.subscribe(handle.deployment_name, publish)
    if not handle.is_initialized:
        handle._init()  # starts the long poll; nothing is ever routed through it


def address_of(members: Members) -> str | None:
    """The link address of the newest member that published one."""
    addresses = [str(meta["address"]) for meta in members.values() if meta.get("address")]
    return addresses[-1] if addresses else None


def log_to_stderr(role: str) -> None:
    """Ray collects a replica's stderr in its session's logs; our loggers write one line an event there.
    `role`: frontend, control, or a worker's pool.

    The process's own stderr, not `sys.stderr`: Serve puts a logger there that walks the stack per line.
    """
    logger = logging.getLogger("kvrelay")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.__stderr__)
        handler.setFormatter(JsonLines(role, serve.get_replica_context().replica_id.unique_id))
        logger.addHandler(handler)
        logger.propagate = False
        logger.setLevel(logging.INFO)
