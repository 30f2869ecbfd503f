"""The Frontend deployment: a raw ASGI app behind Serve's ingress, any number of replicas."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from planner.timing_profile import load_profiles
from serving.closing import ClosingSocket
from serving.config import load_config
from serving.engine.factory import engine_capabilities, engine_context
from serving.frontend_host import FrontendHost
from serving.link_key import link_key, read_key
from serving.local.environment import closing_directory
from serving.manifest import resolve_weights
from serving.registry import Members
from serving.replica import (
    address_of,
    application_name,
    follow_members,
    log_to_stderr,
    refuse_while_leaving,
    replica_identity,
    warn_if_nice,
    warn_without_flags,
)
from serving.served_model import load_served_model

LAST_STREAMS_S = 5.0
FIRST_WORKER_S = 600.0  # a replica is ready once a model can be answered: weights may load for long

Pools = dict[tuple[str, str], dict[str, DeploymentHandle]]


@serve.deployment(
    max_ongoing_requests=100_000,
    ray_actor_options={"num_cpus": 0},
    health_check_period_s=1,
    graceful_shutdown_wait_loop_s=0.1,
    logging_config={"enable_access_log": False},
)
@serve.ingress()
class Frontend:
    """`pools`: (model, variant) -> role -> handle of its deployment, for membership only."""

    async def __init__(self, args: dict[str, Any], control: DeploymentHandle, pools: Pools) -> None:  # type: ignore[misc]
        log_to_stderr("frontend")
        warn_without_flags()
        warn_if_nice(logging.getLogger("kvrelay.frontend"))
        config = load_config(args)
        served = {}
        for model in config.models:
            variant = model.variants[0]
            limits = [engine_context(each) for each in model.variants]
            limit = max((known for known in limits if known is not None), default=None)
            if None in limits:  # one that takes whatever the model was made for
                limit = None
            directory = await asyncio.to_thread(resolve_weights, variant.weights)
            served[model.name] = load_served_model(
                model.name,
                directory,
                context_tokens=limit,
                capabilities=engine_capabilities(variant),
            )
            served[model.name] = replace(served[model.name], classes=model.slo.classes)
            for adapter in sorted(variant.engine.trtllm.lora):
                with_adapter = served[model.name].with_adapter(adapter)
                served[with_adapter.name] = with_adapter
        me = replica_identity("frontend", config.link)
        admin_key = None
        if config.security.admin_key_file is not None:
            admin_key = read_key(config.security.admin_key_file, "security.admin_key_file")
        self._host = FrontendHost(
            config=config,
            me=me,
            key=link_key(config.link, application_name()),
            served=served,
            admin_key=admin_key,
            profiles=load_profiles(config),
            id_is_echoed=True,  # by a middleware of Serve's
        )
        await self._host.start()
        closing = closing_directory()
        self._closing = None if closing is None else ClosingSocket(self._host, closing)
        if self._closing is not None:
            await self._closing.start()
        self._tasks: set[asyncio.Task[None]] = set()
        follow_members(control, self._on_control)
        for (model_name, variant_name), handles in pools.items():
            for role, handle in handles.items():
                follow_members(handle, partial(self._host.update_pool, model_name, variant_name, role))
        async with asyncio.timeout(FIRST_WORKER_S):
            while self._host.health()[0] != 200:
                await asyncio.sleep(0.02)

    def _on_control(self, members: Members) -> None:
        address = address_of(members)
        if address is not None:
            task = asyncio.get_running_loop().create_task(self._host.control.connect(address))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def __serve_build_asgi_app__(self) -> Callable[..., Awaitable[None]]:
        return self._host.api

    async def check_health(self) -> None:
        refuse_while_leaving()

    async def __del__(self) -> None:
        """Awaited by Serve's graceful shutdown, once its own count of requests is 0."""
        await self._host.drain(LAST_STREAMS_S)
        await self._host.stop()
        if self._closing is not None:
            await self._closing.stop()
