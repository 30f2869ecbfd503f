"""A frontend's links to the workers of one variant, and what follows from a link opening or breaking.

Membership (Serve) says who may be placed on; the link says who can be. A worker that leaves the membership,
or says that it drains, gets new requests only when nobody else is left; its streams move to other workers,
and what cannot move ends there. A departed worker's link goes when the last of them ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kvrouter.router import Router, WorkerView
from serving.coordinator import Coordinator
from serving.kept_link import KeptLink
from serving.link import Identity, Link
from serving.registry import Members
from serving.run import WorkerEntry
from serving.step_check import check_step
from serving.wire import (
    AnyMessage,
    Draining,
    FrontendReport,
    LoadReport,
    PeerAddress,
    Peers,
    Snapshot,
    SnapshotRequest,
    Step,
)

log = logging.getLogger("kvrelay.frontend")

EMPTY_LIST_S = 10.0  # an empty membership is believed only after this long, while links live
SUSPECT_S = 1.0  # two beats: nothing new for a worker that may be about to be lost


@dataclass(slots=True)
class _Worker:
    ident: str
    pool: str  # prefill | decode: Serve's deployment
    epoch: int
    address: str
    view: WorkerView
    provenance: dict[str, Any]  # serving.provenance; empty from a worker that does not say
    kept: KeptLink | None = None
    member: bool = True
    draining: bool = False  # it asked for no more requests
    suspect: bool = False  # it missed its beats
    hung: bool = False  # linked or not, it gets nothing until its engine moves
    step: int = 0
    step_s: float = 0.0  # when the step counter last moved, or work last was not runnable

    @property
    def role(self) -> str:
        """What it does now: that of its pool, unless it is lent to the other one."""
        return self.view.role

    @property
    def leaving(self) -> bool:
        return self.draining or not self.member


class VariantLinks:
    """Owns a KeptLink per worker of both pools; `stop` ends them all."""

    def __init__(
        self,
        *,
        name: str,
        me: Identity,
        key: bytes,
        router: Router,
        coordinator: Coordinator,
        entries: dict[str, WorkerEntry],
        pull: bool = False,
        silence_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.name = name
        self.coordinator = coordinator
        self._me = me
        self._key = key
        self._router = router
        self._entries = entries
        self._readers = ("prefill", "decode") if pull else ("decode",)
        self._silence_s = silence_s
        self._clock = clock
        self._workers: dict[str, _Worker] = {}
        self._emptied: dict[str, float] = {}
        self._stopping: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------ membership

    def update(self, pool: str, members: Members) -> None:
        """Serve's list of one pool. Arrivals are dialled, departures no longer placed on."""
        present = {ident: meta for ident, meta in members.items() if meta.get("address")}
        if not present and self._linked(pool):
            self._emptied.setdefault(pool, self._clock())
            return
        self._emptied.pop(pool, None)
        for ident, meta in present.items():
            known = self._workers.get(ident)
            if known is not None and known.epoch != int(str(meta["epoch"])):
                self._drop(known)  # another incarnation under the same name
                known = None
            if known is None:
                self._add(ident, pool, meta)
            elif not known.member:
                known.member = True
                self._show(known)
        for worker in list(self._workers.values()):
            if worker.pool == pool and worker.ident not in present:
                self._depart(worker)

    def _add(self, ident: str, pool: str, meta: dict[str, object]) -> None:
        provenance = meta.get("provenance")
        worker = _Worker(
            ident=ident,
            pool=pool,
            epoch=int(str(meta["epoch"])),
            address=str(meta["address"]),
            view=WorkerView(
                ident=ident,
                role=pool,
                block_tokens=int(str(meta["block_tokens"])),
                total_blocks=int(str(meta["total_blocks"])),
                max_batch=int(str(meta["max_batch"])),
                layout=str(meta["layout"]),
            ),
            provenance=dict(provenance) if isinstance(provenance, dict) else {},
        )
        self._workers[ident] = worker
        worker.kept = KeptLink(worker.address, self._me, self._key, _WorkerHandler(self, worker))
        worker.kept.start()

    def _depart(self, worker: _Worker) -> None:
        if worker.member:
            log.info("%s: %s worker %s leaves; its streams move", self.name, worker.role, worker.ident)
        worker.member = False
        self._show(worker)
        self._empty(worker)

    def _show(self, worker: _Worker) -> None:
        """Tell the router what `worker` is by now."""
        if worker.ident in self._entries:
            worker.view = replace(worker.view, draining=worker.leaving or worker.suspect)
            self._router.add_worker(worker.view)

    def _empty(self, worker: _Worker) -> bool:
        """Move what runs on a leaving worker. False: it had departed, and with the last of it its link."""
        if self.coordinator.move_from(worker.ident) or worker.member:
            return True
        self._drop(worker)
        return False

    def _drop(self, worker: _Worker) -> None:
        """Its link goes now; whatever still runs over it goes on elsewhere."""
        self._workers.pop(worker.ident, None)
        self._unlink(worker)
        self.coordinator.forget_worker(worker.ident)
        if worker.kept is not None:
            task = asyncio.get_running_loop().create_task(worker.kept.stop())
            self._stopping.add(task)
            task.add_done_callback(self._stopping.discard)

    async def stop(self) -> None:
        self.coordinator.stop()
        for worker in list(self._workers.values()):
            self._drop(worker)
        if self._stopping:
            await asyncio.wait(self._stopping)

    # ------------------------------------------------------------ links

    def opened(self, worker: _Worker, link: Link) -> None:
        if link.peer is None or link.peer.ident != worker.ident or link.peer.epoch != worker.epoch:
            link.close("another process answers at this address")
            return
        worker.draining = False  # it says so again if it does, hung or not
        if not worker.hung:  # else its beats decide, in `sweep`
            self._use(worker, link)

    def _use(self, worker: _Worker, link: Link) -> None:
        """From now on it may be placed on."""
        worker.step_s = self._clock()
        self._entries[worker.ident] = WorkerEntry(
            worker.ident, worker.epoch, worker.address, link.send, link.wire_version
        )
        self._show(worker)
        log.info("%s: linked to %s worker %s at %s", self.name, worker.role, worker.ident, worker.address)
        link.send(SnapshotRequest())
        self._share_peers()

    def lost(self, worker: _Worker, reason: str) -> None:
        if self._workers.get(worker.ident) is not worker:
            return  # dropped
        if worker.ident in self._entries:
            log.warning("%s: lost %s worker %s: %s", self.name, worker.role, worker.ident, reason)
        self._unlink(worker)
        if not worker.member:
            self._drop(worker)

    def _unlink(self, worker: _Worker) -> None:
        """Nothing can be sent to it any more; idempotent."""
        if self._entries.pop(worker.ident, None) is not None:
            self._router.remove_worker(worker.ident)
            self.coordinator.on_worker_lost(worker.ident)

    def received(self, worker: _Worker, link: Link, message: AnyMessage) -> None:
        if self._workers.get(worker.ident) is not worker:
            return  # dropped
        if isinstance(message, Draining):
            self._on_draining(worker, message.on)
            return
        if worker.ident not in self._entries:
            return  # hung
        if isinstance(message, Snapshot):
            if not self._router.on_snapshot(worker.ident, worker.epoch, message):
                link.send(SnapshotRequest())
            return
        if not isinstance(message, Step):
            link.close(f"{type(message).__name__} is not for a frontend")
            return
        check_step(message)
        if message.events is not None and not self._router.on_events(
            worker.ident, worker.epoch, message.events
        ):
            link.send(SnapshotRequest())
        if message.load is not None:
            self._on_load(worker, message.load)
        for attempt, tokens in message.placed or ():
            self._router.told(worker.ident, attempt, tokens, self._clock())
        self.coordinator.on_step(message)

    def _on_draining(self, worker: _Worker, on: bool) -> None:
        log.info("%s: %s worker %s %s", self.name, worker.role, worker.ident, "drains" if on else "is back")
        worker.draining = on
        self._show(worker)
        if on:
            self._empty(worker)

    def _on_load(self, worker: _Worker, load: LoadReport) -> None:
        entry = self._entries[worker.ident]
        entry.waiting = load.waiting
        entry.parked = None if load.parked is None else frozenset(load.parked)
        if load.role and load.role != worker.role:
            log.info("%s: worker %s now plays %s", self.name, worker.ident, load.role)
            worker.view = replace(worker.view, role=load.role)
            self._show(worker)
            self._share_peers()
        self._router.on_load(worker.ident, load, self._clock())

    def _share_peers(self) -> None:
        """Tell whoever may read of the prefill workers, so that agents connect ahead of need."""
        peers = Peers(
            [
                PeerAddress(worker.address, worker.ident, worker.epoch, worker.view.layout)
                for worker in self._workers.values()
                if worker.role == "prefill" and worker.ident in self._entries
            ]
        )
        for worker in self._workers.values():
            entry = self._entries.get(worker.ident)
            if entry is not None and worker.role in self._readers:
                entry.send(peers)

    # ------------------------------------------------------------ watching

    def sweep(self) -> None:
        """Every quarter of a second: departures that are done, empty lists that stayed, hung engines."""
        now = self._clock()
        for ident in self._router.sweep(now):
            log.warning("%s: %s serves and sends no KV events; predicting its cache", self.name, ident)
        for pool, since in list(self._emptied.items()):
            if now - since > EMPTY_LIST_S:
                del self._emptied[pool]
                for worker in list(self._workers.values()):
                    if worker.pool == pool:
                        self._depart(worker)
        for worker in list(self._workers.values()):
            if worker.leaving and not self._empty(worker):
                continue
            link = worker.kept.link if worker.kept is not None else None
            if link is None:
                continue
            if (link.silent_s > SUSPECT_S) is not worker.suspect:
                worker.suspect = not worker.suspect
                self._show(worker)
            beat = link.peer_beat
            if beat is None:
                continue
            if beat.step != worker.step or not beat.runnable:
                worker.step, worker.step_s = beat.step, now
                if worker.hung:
                    worker.hung = False
                    self._use(worker, link)
            elif not worker.hung and now - worker.step_s > self._silence_s:
                worker.hung = True
                link.close(f"hung: work is runnable, no step for {self._silence_s:.1f} s")

    def _linked(self, pool: str) -> bool:
        return any(w.pool == pool and w.ident in self._entries for w in self._workers.values())

    def demand(self, model: str, variant: str) -> FrontendReport:
        """Since the last call."""
        return self.coordinator.report(model, variant)

    @property
    def can_answer(self) -> bool:
        """Some decode worker is linked, be it a leaving one."""
        return any(w.role == "decode" and w.ident in self._entries for w in self._workers.values())

    @property
    def has_decoders(self) -> bool:
        """Serve lists some decode worker, linked or not."""
        return any(worker.role == "decode" and worker.member for worker in self._workers.values())

    def ills(self) -> dict[str, str]:
        """What workers say is wrong with them, by ident."""
        links = {w.ident: w.kept.link for w in self._workers.values() if w.kept is not None}
        beats = {ident: link.peer_beat for ident, link in links.items() if link is not None}
        return {ident: beat.ill for ident, beat in beats.items() if beat is not None and beat.ill}

    def provenances(self) -> list[tuple[str, dict[str, Any]]]:
        """(pool, what it serves) of every linked member."""
        return [
            (worker.pool, worker.provenance)
            for worker in self._workers.values()
            if worker.member and worker.ident in self._entries
        ]

    def pools(self) -> dict[str, int]:
        """Linked workers by role that are not leaving."""
        counts = {"prefill": 0, "decode": 0}
        for worker in self._workers.values():
            if not worker.leaving and worker.ident in self._entries:
                counts[worker.role] += 1
        return counts


class _WorkerHandler:
    """The LinkHandler of one worker's links."""

    def __init__(self, links: VariantLinks, worker: _Worker) -> None:
        self._links = links
        self._worker = worker

    def on_open(self, link: Link) -> None:
        self._links.opened(self._worker, link)

    def on_message(self, link: Link, message: AnyMessage) -> None:
        self._links.received(self._worker, link, message)

    def on_lost(self, link: Link, reason: str) -> None:
        self._links.lost(self._worker, reason)
