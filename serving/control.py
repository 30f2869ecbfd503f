"""The Control deployment: one replica, found by everybody through Serve's membership."""

from __future__ import annotations

from typing import Any

import msgspec
from ray import serve
from ray.experimental import internal_kv

from serving.config import load_config
from serving.control_host import ControlHost
from serving.errors import ConfigError
from serving.link_key import link_key
from serving.live_settings import LiveSettings, parse_settings
from serving.replica import (
    FOUND_BY_MEMBERS,
    application_name,
    link_host,
    log_to_stderr,
    replica_identity,
)

_NAMESPACE = b"kvrelay"


@serve.deployment(
    num_replicas=1,
    max_ongoing_requests=1000,
    ray_actor_options={"num_cpus": 0},
    health_check_period_s=1,
    graceful_shutdown_wait_loop_s=0.1,
    graceful_shutdown_timeout_s=5,
    request_router_config=FOUND_BY_MEMBERS,
    logging_config={"enable_access_log": False},
)
class Control:
    """See control_host.py. The methods below are control calls: seldom, through a handle."""

    async def __init__(self, args: dict[str, Any]) -> None:  # type: ignore[misc]
        log_to_stderr()
        config = load_config(args)
        self._store_key = f"settings:{application_name()}".encode()
        self._me = replica_identity("control", config.link)
        self._host = ControlHost(
            me=self._me,
            key=link_key(config.link, application_name()),
            settings=self._stored(),
            save=self._save,
        )
        self._address = await self._host.start(link_host(config.link))

    async def record_replica_metadata(self) -> dict[str, Any]:
        return {"address": self._address, "epoch": self._me.epoch}

    async def settings(self) -> dict[str, Any]:
        return self._host.settings

    async def change_settings(self, changes: dict[str, Any]) -> dict[str, Any]:
        return self._host.change_settings(changes)

    async def members(self) -> list[Any]:
        return [msgspec.to_builtins(member) for member in self._host.members]

    async def __del__(self) -> None:
        await self._host.stop()

    def _stored(self) -> LiveSettings | None:
        """Settings outlive redeploys in the cluster's store; ones a newer version wrote are ignored."""
        data = internal_kv._internal_kv_get(self._store_key, namespace=_NAMESPACE)
        if data is None:
            return None
        try:
            return parse_settings(msgspec.json.decode(data))
        except (msgspec.MsgspecError, ConfigError):
            return None

    def _save(self, values: dict[str, Any]) -> None:
        internal_kv._internal_kv_put(
            self._store_key, msgspec.json.encode(values), overwrite=True, namespace=_NAMESPACE
        )
