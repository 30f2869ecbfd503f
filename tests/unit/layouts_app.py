"""The whole application in one process while its workers are replaced by ones with another KV layout."""

from __future__ import annotations

from typing import Any

import msgspec

from serving.config import SimProfile
from serving.engine.sim import build_sim_engine
from serving.worker_drain import until_unneeded
from tests.unit.app_rig import LONG_S, PLAIN, App, SimWorker
from tests.unit.handoff_fakes import until

# What a change is to a simulated engine and to its profile; another dtype: a token's KV has other bytes.
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dtype": ({}, {"kv_bytes_per_token": 128}),
    "block_tokens": ({"block_tokens": 16}, {}),
}


class NewWorker(SimWorker):
    """Of the configuration that is rolled out; its text is that of the old one."""

    def _make(self, app: LayoutsApp) -> None:  # type: ignore[override]
        super()._make(app)
        spec = app.config.models[0].variants[0].engine
        assert isinstance(spec.profile, SimProfile)
        engine, profile = CHANGES[app.change]
        spec = msgspec.structs.replace(spec, **engine)
        assert isinstance(spec.profile, SimProfile)
        changed = msgspec.structs.replace(spec.profile, **profile)
        self.engine = build_sim_engine(spec, changed, PLAIN, app.model.eos_ids, "tiny")


class LayoutsApp(App):
    def __init__(self, change: str, **options: Any) -> None:
        self.change = change
        super().__init__(**options)
        self._number = len(self.workers)

    async def __aenter__(self) -> LayoutsApp:
        await super().__aenter__()
        return self

    async def add(self, role: str) -> SimWorker:
        """A worker of the new configuration; linked when this returns."""
        worker = NewWorker(self, role, self._number)
        self._number += 1
        worker.address = await worker.host.start("127.0.0.1")
        await worker.control.connect(self.control_address)
        self.workers.append(worker)
        self.publish()
        links = [frontend.variants["tiny", "main"] for frontend in self.frontends]
        await until(lambda: all(worker.me.ident in one._entries for one in links), LONG_S)
        return worker

    async def retire(self, worker: SimWorker, limit_s: float = LONG_S) -> None:
        """As Serve stops a replica: it leaves the lists, drains, and ends."""
        self.workers.remove(worker)
        self.dead.append(worker)
        worker.host.drain("leaves")
        self.publish()
        await until_unneeded(worker.host, limit_s)
        await worker.kill(frozen=False)

    async def replace(self, role: str) -> None:
        """A pool, worker by worker, as many as there were at any time."""
        for old in [worker for worker in self.pool(role) if not isinstance(worker, NewWorker)]:
            await self.add(role)
            await self.retire(old)
