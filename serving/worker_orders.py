"""What a worker does about Control's orders, and what it reports back."""

from __future__ import annotations

import asyncio
import logging

from serving.wire import Orders, WorkerReport
from serving.worker_host import WorkerHost

log = logging.getLogger("kvrelay.worker")

POLL_S = 0.05


class OrderedWorker:
    """Applies orders to `host`; `pool` is the role of its Serve deployment."""

    def __init__(self, host: WorkerHost, pool: str) -> None:
        self._host = host
        self._pool = pool
        self._wanted = pool
        self._switching: asyncio.Task[None] | None = None
        self._stopped = False

    def on_orders(self, orders: Orders) -> None:
        if self._stopped:
            return
        ident = self._host.me.ident
        if ident in orders.draining:
            self._host.drain("ordered")
        else:
            self._host.undrain("ordered")
        self._wanted = orders.roles.get(ident, self._pool)
        if self._wanted != self._host.role and self._switching is None:
            self._switching = asyncio.get_running_loop().create_task(self._switch())

    async def stop(self) -> None:
        """The worker leaves: orders that still come are not followed any more."""
        self._stopped = True
        if self._switching is not None:
            self._switching.cancel()
            await asyncio.wait([self._switching])

    def report(self) -> list[WorkerReport]:
        """Nothing before the engine has shown its first load."""
        host, load = self._host, self._host.metrics.load
        if load is None:
            return []
        blocks, counters = load.blocks, host.engine.counters
        return [
            WorkerReport(
                role=host.role,
                draining=host.draining,
                busy=host.busy,
                attempts=host.attempts,
                leases=host.leases,
                running=load.running,
                waiting=load.waiting,
                waiting_tokens=load.waiting_tokens,
                free_blocks=blocks.free + blocks.cached,
                total_blocks=blocks.total,
                step_ms=load.step_ms,
                prompt_tokens=counters.prompt_tokens_computed,
                generated_tokens=counters.tokens_generated,
            )
        ]

    async def _switch(self) -> None:
        """Drain the old role, then play the new one. Orders that change meanwhile are followed."""
        began = asyncio.get_running_loop().time()
        host = self._host
        try:
            while self._wanted != host.role:
                host.drain("changes role")
                while host.busy and self._wanted != host.role:
                    await asyncio.sleep(POLL_S)
                host.play(self._wanted)
            took = asyncio.get_running_loop().time() - began
            log.info("plays %s, %.2f s after it was told to", host.role, took)
        finally:
            self._switching = None
        host.undrain("changes role")
