"""The Control deployment: one replica, found by everybody through Serve's membership."""

from __future__ import annotations

from typing import Any

import msgspec
from ray import serve
from ray.experimental import internal_kv

from planner.connector import ServeConnector
from planner.timing_profile import load_profiles
from serving.config import load_config
from serving.control_host import ControlHost
from serving.errors import ConfigError
from serving.link_key import link_key
from serving.live_settings import LiveSettings, parse_settings
from serving.planner_host import PlannerHost
from serving.replica import (
    FOUND_BY_MEMBERS,
    application_name,
    link_host,
    log_to_stderr,
    refuse_while_leaving,
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
        log_to_stderr("control")
        config = load_config(args)
        self._settings_key = f"settings:{application_name()}".encode()
        self._orders_key = f"orders:{application_name()}".encode()
        self._counted_key = f"counted:{application_name()}".encode()
        self._me = replica_identity("control", config.link)
        connector = ServeConnector(application_name())
        self._host = ControlHost(
            me=self._me,
            key=link_key(config.link, application_name()),
            settings=self._stored_settings(),
            save=lambda values: _store(self._settings_key, values),
            save_orders=lambda values: _store(self._orders_key, values),
            variants={model.name: [variant.name for variant in model.variants] for model in config.models},
            listed=connector.replicas,
        )
        self._host.orders.restore(_stored(self._orders_key))
        counted = internal_kv._internal_kv_get(self._counted_key, namespace=_NAMESPACE)
        if counted is not None:
            self._host.take_over(counted)
        self._address = await self._host.start(link_host(config.link))
        times = {key: profile.times for key, profile in load_profiles(config).items()}
        self._planner = PlannerHost(
            control=self._host,
            config=config,
            connector=connector,
            times=times,
        )
        await self._planner.start()

    async def record_replica_metadata(self) -> dict[str, Any]:
        return {"address": self._address, "epoch": self._me.epoch}

    async def settings(self) -> dict[str, Any]:
        return self._host.settings

    async def change_settings(self, changes: dict[str, Any]) -> dict[str, Any]:
        return self._host.change_settings(changes)

    async def members(self) -> list[Any]:
        return [msgspec.to_builtins(member) for member in self._host.members]

    async def check_health(self) -> None:
        refuse_while_leaving()

    async def __del__(self) -> None:
        await self._planner.stop()
        counted = self._host.counted()
        internal_kv._internal_kv_put(self._counted_key, counted, overwrite=True, namespace=_NAMESPACE)
        await self._host.stop()

    def _stored_settings(self) -> LiveSettings | None:
        """Those that a newer version wrote are ignored."""
        try:
            return parse_settings(_stored(self._settings_key))
        except ConfigError:
            return None


# What Control owns outlives redeploys, and Control, in the cluster's store.


def _stored(key: bytes) -> dict[str, Any]:
    """Empty when there is nothing, or nothing that can be read."""
    data = internal_kv._internal_kv_get(key, namespace=_NAMESPACE)
    try:
        return msgspec.json.decode(data, type=dict[str, Any]) if data is not None else {}
    except msgspec.MsgspecError:
        return {}


def _store(key: bytes, values: dict[str, Any]) -> None:
    internal_kv._internal_kv_put(key, msgspec.json.encode(values), overwrite=True, namespace=_NAMESPACE)
