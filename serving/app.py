"""YAML `args` -> Serve application: what `import_path: serving.app:build` names."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

from ray import cloudpickle
from ray.serve import Application
from ray.serve._private.constants import SERVE_NAMESPACE
from ray.serve._private.deployment_state import CHECKPOINT_KEY
from ray.serve._private.storage.kv_store import RayInternalKVStore

from decode.deployment import decode_deployment
from prefill.deployment import prefill_deployment
from serving.config import FrontendConfig, load_config
from serving.control import Control
from serving.deployment_name import FRONTEND, deployment_name
from serving.frontend import Frontend

log = logging.getLogger("kvrelay.app")


def build(args: dict[str, Any]) -> Application:
    """The application: frontends over a prefill and a decode pool per variant, and Control.

    Raises ConfigError with one line when `args` are wrong; nothing was started then.
    """
    config = load_config(args)
    running = running_targets()
    # Neither computes anything that Ray should count; where they may be is the configuration's.
    door_options: dict[str, Any] = {"num_cpus": 0}
    if config.frontend.labels:
        door_options["label_selector"] = config.frontend.labels
    control = Control.options(ray_actor_options=door_options).bind(args)  # type: ignore[attr-defined]
    pools = {}
    for model in config.models:
        for variant in model.variants:
            handles = {}
            for role, pool, deployment in (
                ("prefill", variant.prefill, prefill_deployment),
                ("decode", variant.decode, decode_deployment),
            ):
                name = deployment_name(model.name, variant.name, role)
                wanted = max(running.get(name, 0), pool.replicas, pool.min_replicas)
                replicas = min(wanted, pool.max_replicas)
                if replicas == 0:
                    continue  # Serve deploys no empty pool; decode workers prefill by themselves
                handles[role] = deployment(
                    name=name,
                    args=args,
                    model=model.name,
                    variant=variant,
                    replicas=replicas,
                    control=control,
                    deadlines=config.deadlines,
                )
            pools[model.name, variant.name] = handles
    frontend = Frontend.options(  # type: ignore[attr-defined]
        num_replicas=frontend_replicas(config.frontend, running.get(FRONTEND, 0)),
        ray_actor_options=door_options,
        max_replicas_per_node=config.frontend.max_per_node,
        graceful_shutdown_timeout_s=config.deadlines.request_ms / 1e3 + 5,
    )
    application: Application = frontend.bind(args, control, pools)
    return application


def frontend_replicas(frontend: FrontendConfig, running: int) -> int:
    """As configured; where the planner may grow them, never fewer than there are."""
    if frontend.max_replicas is None:
        return frontend.replicas
    return min(max(running, frontend.replicas), frontend.max_replicas)


def running_targets() -> Mapping[str, int]:
    """Replica targets of the application's deployments that run now: a redeploy never shrinks a pool.

    Serve's status names no deployment of an application while that application is being built, so they
    come from the record by which a Serve controller finds its deployments again. Empty when nothing runs
    yet, which a failing look-up means as well: it must not stop a deploy.
    """
    try:
        saved = RayInternalKVStore(f"ray-serve-{SERVE_NAMESPACE}").get(CHECKPOINT_KEY)
        states = {} if saved is None else cloudpickle.loads(saved)
        running = {deployment.app_name for deployment in states}
        application = application_being_built() or (running.pop() if len(running) == 1 else None)
        if running and application is None:
            log.warning("which application is built is not known: replica targets are as configured")
        return {
            deployment.name: state.target_num_replicas
            for deployment, state in states.items()
            if deployment.app_name == application
        }
    except Exception as error:  # no Ray in this process, or another Serve than this was written for
        log.warning("the replica targets of what runs are not known: %s", error)
        return {}


def application_being_built() -> str | None:
    """Serve tells a builder its arguments alone; the task that calls it knows the application's name."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "build_serve_application":
        frame = frame.f_back
    return None if frame is None else str(frame.f_locals["name"])


__all__ = ["build", "running_targets"]
