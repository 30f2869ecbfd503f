"""The planner's hands: replica counts of the live application, read and set through Serve's controller.

The application must be deployed with `external_scaler_enabled: true`; Serve keeps no opinion of its own
then. A redeploy puts the counts of its configuration back: whoever scales asks and sets again every tick.
"""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.serve._private.common import DeploymentID
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

from planner.scaling import ReplicaCounts
from serving.errors import Unavailable

CALL_S = 5.0
REPLACED_S = 30.0  # health checks run every second; three must fail
POLL_S = 0.05
STARTING = ("STARTING", "UPDATING", "RECOVERING", "PENDING_MIGRATION")


class ServeConnector:
    """Implements `planner.scaling.Connector` for one application."""

    def __init__(self, application: str) -> None:
        self._application = application
        self._controller: Any = None

    async def counts(self) -> dict[str, ReplicaCounts]:
        """By deployment name. Raises Unavailable while the controller is away."""
        details = await self._call("get_serve_instance_details")
        application = details["applications"].get(self._application)
        if application is None:
            raise Unavailable(f"Serve knows no application {self._application!r}")
        counts: dict[str, ReplicaCounts] = {}
        for name, deployment in application["deployments"].items():
            states = [str(getattr(r["state"], "value", r["state"])) for r in deployment["replicas"]]
            counts[name] = ReplicaCounts(
                target=int(deployment["target_num_replicas"]),
                running=states.count("RUNNING"),
                starting=sum(state in STARTING for state in states),
                stopping=states.count("STOPPING"),
                replicas=frozenset(str(r["replica_id"]) for r in deployment["replicas"]),
                leaving=frozenset(
                    str(r["replica_id"])
                    for r, state in zip(deployment["replicas"], states, strict=True)
                    if state == "STOPPING"
                ),
                unplaced=sum(
                    state == "STARTING" and r.get("node_id") is None
                    for r, state in zip(deployment["replicas"], states, strict=True)
                ),
            )
        return counts

    async def replicas(self) -> set[str]:
        """Every replica there is, in whatever state. Raises Unavailable, as `counts`."""
        counts = await self.counts()
        if not counts:  # none is named while Serve builds
            raise Unavailable(f"Serve does not list the deployments of {self._application!r}")
        return {replica for there in counts.values() for replica in there.replicas}

    async def scale(self, deployment: str, replicas: int) -> None:
        """Set the target; idempotent. Raises Unavailable with what stands against it."""
        await self._call(
            "update_deployment_replicas", DeploymentID(deployment, self._application), replicas
        )

    async def remove(self, deployment: str, replica: str) -> None:
        """End `replica`, which nobody needs any more, and lower the target by one; its place stays empty.

        Serve chooses whom a lower target stops: what does not run yet, else the newest. So the replica ends
        first, and what the lower target stops is its replacement, which has only just begun to start.
        Raises Unavailable.
        """
        before = (await self.counts())[deployment]
        name = f"SERVE_REPLICA::{self._application}#{deployment}#{replica}"
        try:
            ray.kill(ray.get_actor(name, namespace=SERVE_NAMESPACE))
        except ValueError:
            raise Unavailable(f"{replica} is no replica of {deployment} any more") from None
        try:
            async with asyncio.timeout(REPLACED_S):
                while (await self.counts())[deployment].starting <= before.starting:
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise Unavailable(
                f"Serve did not notice within {REPLACED_S} s that {replica} is gone"
            ) from None
        await self.scale(deployment, before.target - 1)

    async def _call(self, method: str, *arguments: Any) -> Any:
        try:
            if self._controller is None:
                self._controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
            async with asyncio.timeout(CALL_S):
                return await getattr(self._controller, method).remote(*arguments)
        except TimeoutError:
            raise Unavailable(f"Serve's controller did not answer within {CALL_S} s") from None
        except Exception as error:  # Ray raises many kinds, and those of the far side
            self._controller = None
            cause = str(getattr(error, "cause", None) or error).strip().splitlines()
            raise Unavailable(
                f"Serve's controller: {cause[0] if cause else type(error).__name__}"
            ) from None
