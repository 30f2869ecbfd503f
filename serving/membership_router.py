"""Serve's request router, used only as a feed of replica arrivals and departures.

This class stands alone in its module: Serve pickles it by value with the module (see registry.py).
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import RequestRouter

from serving import registry


class MembershipRouter(RequestRouter):  # type: ignore[misc]
    """Publishes what each replica recorded about itself; routes control calls to any replica."""

    def update_replicas(self, replicas: list[Any]) -> None:
        super().update_replicas(replicas)
        registry.publish(
            self._deployment_id.name,
            {replica.replica_id.unique_id: dict(replica.replica_metadata or {}) for replica in replicas},
        )

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        return [candidate_replicas]
