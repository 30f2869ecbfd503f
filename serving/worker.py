"""The Worker class of both pools: one replica, one engine, one KV pool, one agent, one epoch."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import Any

import msgspec
import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from serving.config import Deadlines, Variant, load_config
from serving.control_client import ControlClient
from serving.engine.base import Engine
from serving.engine.factory import build_engine
from serving.engine.trtllm.placement import ray_placement, reserved
from serving.kv.elsewhere import MovedElsewhere
from serving.kv.io import KvIo
from serving.kv.nixl import NixlTransfer
from serving.link_key import link_key
from serving.metrics import Registry
from serving.provenance import export, start_provenance
from serving.registry import Members
from serving.replica import (
    FOUND_BY_MEMBERS,
    address_of,
    application_name,
    follow_members,
    link_host,
    log_to_stderr,
    refuse_while_leaving,
    replica_identity,
    warn_if_nice,
)
from serving.times_check import check_times
from serving.wire import Register
from serving.worker_args import find_variant, worker_args
from serving.worker_drain import until_unneeded
from serving.worker_host import WorkerHost
from serving.worker_orders import OrderedWorker

log = logging.getLogger("kvrelay.worker")


class Worker:
    """A Serve deployment is made of it by `worker_deployment`."""

    async def __init__(  # type: ignore[misc]
        self, args: dict[str, Any], model: str, variant: str, role: str, control: DeploymentHandle
    ) -> None:
        began_s = time.monotonic()
        log_to_stderr(role)
        warn_if_nice(logging.getLogger("kvrelay.worker"))
        config = load_config(args)
        me = replica_identity("worker", config.link)
        key = link_key(config.link, application_name())
        spec = find_variant(config, model, variant)
        self._provenance = await asyncio.to_thread(start_provenance, spec, role)  # refuses before it loads
        await asyncio.to_thread(check_times, spec, self._provenance.weights_digest, role)
        engine: Engine = await asyncio.to_thread(partial(build_engine, spec, role, **engine_place(spec)))
        transfer = MovedElsewhere if engine.capabilities.moves_kv else NixlTransfer
        registry = Registry({"model": model, "variant": variant, "pool": role, "worker": me.ident})
        export(registry, self._provenance)
        self._max_batch = spec.engine.max_batch
        self._drain_s = config.deadlines.drain_ms / 1e3
        self._host = WorkerHost(
            me=me,
            role=role,
            engine=engine,
            kv_io=KvIo(transfer(f"{me.ident}-{me.epoch:x}")),
            key=key,
            deadlines=config.deadlines,
            registry=registry,
            health=config.health,
        )
        self._address = await self._host.start(link_host(config.link), config.link.port)
        labels = {"model": model, "variant": variant, "pool": role}
        self._ordered = OrderedWorker(self._host, role)
        self._control = ControlClient(
            me=me,
            key=key,
            registry=registry,
            register=Register(me.kind, me.ident, labels, self._address),
            on_settings=lambda settings: logging.getLogger("kvrelay").setLevel(settings.log_level),
            on_orders=self._ordered.on_orders,
            report=self._ordered.report,
        )
        self._tasks: set[asyncio.Task[None]] = set()
        follow_members(control, self._on_control)
        told = {
            **labels,
            "weights": spec.weights,
            "engine": self._provenance.engine,
            "kv_dtype": self._provenance.kv_dtype,
            "blocks": engine.memory.n_blocks,
            "block_tokens": engine.block_tokens,
            "address": self._address,
            "load_s": time.monotonic() - began_s,
        }
        log.info("ready", extra={"fields": told})

    def _on_control(self, members: Members) -> None:
        address = address_of(members)
        if address is not None:
            task = asyncio.get_running_loop().create_task(self._control.connect(address))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def record_replica_metadata(self) -> dict[str, Any]:
        """Rides Serve's membership feed to every frontend, once, when the replica is ready."""
        engine = self._host.engine
        return {
            "address": self._address,
            "epoch": self._host.me.epoch,
            "role": self._host.role,
            "layout": engine.layout,
            "block_tokens": engine.block_tokens,
            "total_blocks": engine.memory.n_blocks,
            "max_batch": self._max_batch,
            "provenance": msgspec.to_builtins(self._provenance),
        }

    async def check_health(self) -> None:
        """Raises when the engine is of no use any more, so that Serve replaces the replica."""
        refuse_while_leaving()
        self._host.check_alive()

    async def __del__(self) -> None:
        """Awaited by Serve's graceful shutdown: link streams are invisible to it, so they drain here."""
        await self._ordered.stop()
        self._host.drain("leaves")
        await until_unneeded(self._host, self._drain_s)
        await self._control.stop()
        await self._host.stop()


def engine_place(variant: Variant) -> dict[str, Any]:
    """What this replica has for its engine, where the engine has to know: GPUs, or its placement group."""
    if variant.engine.kind != "tensorrt_llm":
        return {}
    if variant.engine.trtllm.orchestrator == "ray":
        return {"placement": ray_placement(ray.util.get_current_placement_group())}
    return {"gpus": len(ray.get_gpu_ids())}


def worker_deployment(
    *,
    name: str,
    args: dict[str, Any],
    model: str,
    variant: Variant,
    role: str,
    replicas: int,
    control: Any,
    deadlines: Deadlines,
) -> Any:
    """The bound deployment of one pool; `role` is prefill or decode."""
    pool = variant.prefill if role == "prefill" else variant.decode
    options: dict[str, Any] = {"num_cpus": pool.cpus, "num_gpus": pool.gpus}
    bundles: dict[str, Any] = {}
    if variant.engine.kind == "tensorrt_llm":
        engine = variant.engine.trtllm
        options, bundles = reserved(pool, pool.parallel or variant.parallel, engine.orchestrator)
    if pool.labels:
        options["label_selector"] = pool.labels
    # Set before torch is imported, and per replica: two workers that spin on two cores slow each other 3x.
    options["runtime_env"] = {
        "env_vars": {
            "OMP_WAIT_POLICY": "PASSIVE",
            "GOMP_SPINCOUNT": "0",
            "OMP_NUM_THREADS": str(variant.engine.threads),
        }
    }
    deployment = serve.deployment(
        Worker,
        name=name,
        num_replicas=replicas,
        max_ongoing_requests=100_000,
        ray_actor_options=options,
        **bundles,
        health_check_period_s=1,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=deadlines.drain_ms / 1e3 + 5,
        request_router_config=FOUND_BY_MEMBERS,
        logging_config={"enable_access_log": False},
    )
    return deployment.bind(worker_args(args, model, variant.name), model, variant.name, role, control)
