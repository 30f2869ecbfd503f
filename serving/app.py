"""YAML `args` -> Serve application: what `import_path: serving.app:build` names."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application

from decode.deployment import decode_deployment
from prefill.deployment import prefill_deployment
from serving.config import load_config
from serving.control import Control
from serving.deployment_name import deployment_name
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
        num_replicas=config.frontend.replicas,
        ray_actor_options=door_options,
        max_replicas_per_node=config.frontend.max_per_node,
        graceful_shutdown_timeout_s=config.deadlines.request_ms / 1e3 + 5,
    )
    application: Application = frontend.bind(args, control, pools)
    return application


def running_targets() -> Mapping[str, int]:
    """Replica targets of this application's deployments now, so that a redeploy never shrinks a pool.

    Empty when nothing runs yet, which a failing look-up means as well: it must not stop a deploy.
    """
    try:
        applications = serve.status().applications
    except Exception as error:  # no Serve yet: RayServeException, or no Ray in this process at all
        log.info("no running application to take replica targets from: %s", error)
        return {}
    targets: dict[str, int] = {}
    for application in applications.values():
        for name, deployment in application.deployments.items():
            # A replica that is leaving is no target: counting it would grow the pool with every redeploy.
            states = deployment.replica_states.items()
            targets[name] = sum(count for state, count in states if state != "STOPPING")
    return targets


__all__ = ["build", "running_targets"]
