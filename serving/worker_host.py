"""A worker without Ray: one engine, one KV pool, one transfer agent, and the links that use them.

The engine's thread hands over one StepOutput a step; whatever queued up since the last turn of the event
loop leaves as one frame per frontend. Messages of frontends become engine verbs; messages of readers go to
the move role if they are about what decodes here, else to the prefill role; answers of owners to the KV
reader. Every worker has all roles: what its pool plays decides only what the router sends it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from functools import partial

from decode.counters import MoveCounters
from decode.moves import MoveRole
from decode.role import DecodeRole
from prefill.pull import PullRole
from prefill.role import PrefillRole
from serving.canary import Canary, DrainReason
from serving.config import Deadlines, HealthConfig
from serving.engine.base import AttemptId, Engine, EngineDied, Mode, StepOutput, StoredRun
from serving.kv.io import KvIo
from serving.kv.peer_link import PeerLinks
from serving.kv.reader import KvReader
from serving.kv.transfer import TransferCounters
from serving.link import Identity, Link, LinkServer, dial
from serving.load_report import ReportPeriod, load_report, tell_others
from serving.metrics import Registry
from serving.outbox import Outbox, Outgoing
from serving.submitted import read_submit
from serving.wire import (
    LAYOUT,
    STEP,
    AnyMessage,
    Attach,
    Beat,
    Begun,
    Cancel,
    Confirm,
    Detach,
    Draining,
    Ended,
    Lend,
    LoadReport,
    Logprobs,
    PeerHello,
    Peers,
    Ready,
    Renew,
    Snapshot,
    SnapshotRequest,
    Step,
    Stored,
    Submit,
    pack_u64,
)
from serving.worker_metrics import WorkerMetrics

log = logging.getLogger("kvrelay.worker")

MOST_ATTEMPTS = 1 << 16  # at once, of all frontends
READER_MESSAGES = (PeerHello, Attach, Lend, Ready, Renew, Confirm, Detach)


@dataclass(slots=True)
class _Chains:
    """A snapshot of the cache on its way to `link`; it stands between two outputs."""

    link: Link
    runs: list[StoredRun]


class WorkerHost:
    """`start` and `stop` are a pair; everything between runs on the loop that called `start`."""

    def __init__(
        self,
        *,
        me: Identity,
        role: str,
        engine: Engine,
        kv_io: KvIo,
        key: bytes,
        deadlines: Deadlines,
        registry: Registry,
        health: HealthConfig | None = None,
    ) -> None:
        self.me = me
        self.role = role
        self.engine = engine
        self.kv_io = kv_io
        self._loop = asyncio.get_running_loop()
        self._server = LinkServer(me, key, self, beat=self.beat)
        self._frontends: set[Link] = set()
        self._snapshots: set[Link] = set()  # being made for these
        self._owners: dict[AttemptId, Link] = {}
        self._modes: dict[AttemptId, Mode] = {}
        self._outputs: deque[StepOutput | _Chains] = deque()
        self._flush_due = False
        self._event_seq = 0
        self._reports = ReportPeriod(self._loop, self._schedule_flush)
        self._last = Beat()
        self._drains: frozenset[DrainReason] = frozenset()
        self.peers = PeerLinks(
            me=me,
            dial=lambda address, handler: dial(address, me, key, handler, beat=self.beat),
            kv_io=kv_io,
            layout=engine.layout,
        )
        self.prefill = PrefillRole(engine=engine, kv_io=kv_io, deadlines=deadlines)
        self.reader = KvReader(engine=engine, kv_io=kv_io, peers=self.peers, deadlines=deadlines)
        self.decode = DecodeRole(
            engine=engine,
            reader=self.reader,
            deadlines=deadlines,
            on_failed=self._on_read_failed,
            on_unneeded=self._forget,
            on_arrived=self._on_kv_arrived,
        )
        self.pulls = PullRole(engine=engine, reader=self.reader, on_failed=self._on_read_failed)
        self.metrics = WorkerMetrics(registry, self)
        self.canary = Canary(self, health or HealthConfig(), registry)
        self.moves = MoveRole(
            engine=engine,
            kv_io=kv_io,
            deadlines=deadlines,
            runs=lambda attempt: self._modes.get(attempt, Mode.PREFILL) is not Mode.PREFILL,
            on_moved=self._on_moved,
            on_pause=self.metrics.migration_pause.observe,
        )

    async def start(self, host: str, port: int = 0) -> str:
        """Register the pool, start the engine, listen; returns the address to publish."""
        await self.kv_io.open(self.engine.memory)
        self.engine.start(self._on_engine_step)
        self.prefill.start()
        self.canary.start()
        return await self._server.start(host, port)

    async def stop(self) -> None:
        await self.canary.stop()
        await self._server.stop()
        await self.reader.stop()
        self.moves.stop()
        await self.prefill.stop()
        await self.peers.stop()
        await asyncio.to_thread(self.engine.stop)
        await self.kv_io.close()

    @property
    def attempts(self) -> int:
        """Attempts that some frontend still waits for."""
        return len(self._owners)

    @property
    def busy(self) -> bool:
        """Somebody waits for tokens, reads our KV or may still write into it."""
        return bool(self._owners) or not self.prefill.idle or not self.reader.idle

    def drain(self, why: DrainReason = "ordered") -> None:
        """Ask every frontend, later ones too, to place nothing here and to move elsewhere what is here.
        Nothing is refused: what comes all the same is served. Until `undrain` for every such reason."""
        self._drain_for(self._drains | {why})

    def undrain(self, why: DrainReason = "ordered") -> None:
        """Idempotent, as `drain`."""
        self._drain_for(self._drains - {why})

    def _drain_for(self, whys: frozenset[DrainReason]) -> None:
        was, self._drains = self.draining, whys
        if self.draining is not was:
            for link in self._frontends:
                link.send(Draining(not was))

    @property
    def draining(self) -> bool:
        return bool(self._drains)

    @property
    def leases(self) -> int:
        return self.prefill.counters.leases_held

    @property
    def reads_in_flight(self) -> int:
        return self.kv_io.reads_in_flight

    @property
    def transfers(self) -> TransferCounters:
        return self.kv_io.counters

    @property
    def handoff_failures(self) -> int:
        return sum(self.decode.counters.failures.values())

    @property
    def migrations(self) -> dict[str, MoveCounters]:
        return {"in": self.decode.moves, "out": self.moves.counters}

    @property
    def n_pulls(self) -> int:
        return self.pulls.counters.pulls

    @property
    def pull_failures(self) -> int:
        return sum(self.pulls.counters.failures.values())

    def play(self, role: str) -> None:
        """From now on this is what it says it does: prefill or decode. It can do both all the time."""
        self.role = role
        self._reports.now()
        self._schedule_flush()

    def check_alive(self) -> None:
        """Raises EngineDied when this worker should be replaced."""
        self.canary.check()

    # ------------------------------------------------------------ links

    def on_open(self, link: Link) -> None:
        if link.peer is not None and link.peer.kind == "frontend":
            self._frontends.add(link)
            self._reports.now()
            if self.draining:
                link.send(Draining(True))
            self._schedule_flush()

    def on_lost(self, link: Link, reason: str) -> None:
        """Nobody waits for that frontend's attempts any more; a reader's leases run out by themselves."""
        self._snapshots.discard(link)
        if link in self._frontends:
            self._frontends.discard(link)
            for attempt in [a for a, owner in self._owners.items() if owner is link]:
                self._cancel(attempt)
        else:
            self.moves.on_reader_lost(link)
            self.prefill.on_reader_lost(link)
        log.info("link from %s lost: %s", link.name, reason)

    def on_message(self, link: Link, message: AnyMessage) -> None:
        if isinstance(message, Submit):
            self._submit(link, message)
        elif isinstance(message, Cancel):
            if self._owners.get(AttemptId(message.attempt), link) is link:
                self._cancel(AttemptId(message.attempt))
        elif isinstance(message, READER_MESSAGES):
            if not self.moves.on_message(link, message):
                self.prefill.on_message(link, message)
        elif isinstance(message, Peers):
            self.peers.warm([p for p in message.peers if p.ident != self.me.ident])
        elif isinstance(message, SnapshotRequest):
            if link not in self._snapshots:  # one at a time: each costs the engine's thread a look at all
                self._snapshots.add(link)
                self.engine.request_snapshot(partial(self._on_snapshot, link))
        else:
            link.close(f"{type(message).__name__} is not for a worker")

    def beat(self) -> Beat:
        """What every link tells of this worker."""
        return Beat(self._last.step, self._last.runnable, self.canary.ill)

    def work_is_runnable(self) -> None:
        """Until the engine says otherwise: one that hangs in its very next step says nothing at all."""
        self._last = Beat(self._last.step, runnable=True)

    # ------------------------------------------------------------ requests

    def _submit(self, link: Link, submit: Submit) -> None:
        attempt = AttemptId(submit.attempt)
        if attempt in self._owners or self.prefill.has(attempt):
            return  # a repeated frame
        if len(self._owners) >= MOST_ATTEMPTS:
            link.send(Step(ended=[Ended(attempt, "", "too many attempts", retryable=True)]))
            return
        try:
            work = read_submit(submit, self.engine, self.me.epoch)
        except ValueError as error:
            link.send(Step(ended=[Ended(submit.attempt, "", f"malformed submit: {error}")]))
            return
        self._owners[attempt] = link
        self._modes[attempt] = work.mode
        if work.mode is Mode.DECODE:
            self.decode.accept(submit)
        elif work.mode is Mode.PREFILL:
            self.prefill.accept(submit)
        if work.pull_tokens:
            self.pulls.accept(submit)
        try:
            self.engine.submit(work)
            self.work_is_runnable()
            if work.mode is not Mode.DECODE:
                tell_others(link, submit, self._frontends)
        except (EngineDied, ValueError) as error:
            self._cancel(attempt)
            link.send(Step(ended=[Ended(attempt, "", str(error), isinstance(error, EngineDied))]))

    def _cancel(self, attempt: AttemptId) -> None:
        """In whatever state; of a prefill that was handed over the lease may be left."""
        if self._modes.get(attempt, Mode.PREFILL) is Mode.PREFILL:
            self.prefill.cancel(attempt)
        self.moves.cancel(attempt)
        if not self.reader.cancel(attempt):  # who waits for KV knows whether a read is in flight
            self.engine.cancel(attempt)
        self._forget(attempt)

    def _forget(self, attempt: AttemptId) -> None:
        self._modes.pop(attempt, None)
        self._owners.pop(attempt, None)

    def _on_moved(self, attempt: AttemptId) -> None:
        """All its tokens have left: the last chunk came after them."""
        link = self._owners.get(attempt)
        self._forget(attempt)
        if link is not None:
            link.send(Step(ended=[Ended(attempt, "moved")]))

    def _on_kv_arrived(self, attempt: AttemptId) -> None:
        """Of a hand-off this is when it begins for its frontend: the transfer's deadline is over."""
        link = self._owners.get(attempt)
        if link is not None:
            link.send(Step(begun=[Begun(attempt, 0)]))

    def _on_read_failed(self, attempt: AttemptId, message: str, alike: bool) -> None:
        """The role freed its blocks."""
        link = self._owners.get(attempt)
        self.prefill.on_failed(attempt, message)
        self._forget(attempt)
        if link is not None:
            link.send(Step(ended=[Ended(attempt, "" if alike else LAYOUT, message, retryable=True)]))

    # ------------------------------------------------------------ engine output

    def _on_engine_step(self, output: StepOutput) -> None:
        """On the engine's thread: queue, and wake the loop unless it is already on its way."""
        self._outputs.append(output)
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon_threadsafe(self._flush)

    def _schedule_flush(self) -> None:
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Everything that queued up becomes one frame per frontend."""
        self._flush_due = False  # first: what comes from now on schedules a turn of its own
        outputs = self._outputs
        going = Outgoing(self._frontends)
        while outputs:
            output = outputs.popleft()
            if isinstance(output, _Chains):
                # What was told before it leaves first, so that later events continue the snapshot.
                self._send(going)
                going = Outgoing(self._frontends)
                chains = [Stored(run.parent, pack_u64(list(run.hashes))) for run in output.runs]
                output.link.send(Snapshot(self._event_seq, chains))
                self._snapshots.discard(output.link)
                continue
            if going.undone_by(output):
                self._send(going)
                going = Outgoing(self._frontends)
            self._sort(output, going.outboxes)
            going.add_events(output)
            self.metrics.on_step(output)
            self.canary.on_step(output)
            self._last = Beat(output.load.step, output.load.runnable)
        self._send(going)

    def _send(self, going: Outgoing) -> None:
        events = None
        if going.has_events:
            self._event_seq += 1
            events = going.events(self._event_seq)
        load = self._load_report()
        for link, outbox in going.outboxes.items():
            frame = outbox.frame(events, load)
            if frame is not None:
                link.send(frame)

    def _sort(self, output: StepOutput, outboxes: dict[Link, Outbox]) -> None:
        owners = self._owners
        if len(outboxes) == 1 and not output.logprobs:
            outbox = next(iter(outboxes.values()))
            outbox.attempts += output.attempts
            outbox.positions += output.positions
            outbox.tokens += output.tokens
        elif output.tokens:
            for row, attempt in enumerate(output.attempts):
                link = owners.get(attempt)
                if link is None or link not in outboxes:
                    continue
                outbox = outboxes[link]
                drawn = output.logprobs.get(row)
                if drawn is not None:
                    outbox.logprobs.append(Logprobs(len(outbox.tokens), drawn.logprob, drawn.top))
                outbox.attempts.append(attempt)
                outbox.positions.append(output.positions[row])
                outbox.tokens.append(output.tokens[row])
        for started in output.started:
            link = owners.get(started.attempt)
            if link in outboxes and self._modes.get(started.attempt) is not Mode.DECODE:
                outboxes[link].begun.append(Begun(started.attempt, started.n_cached))
        for moved in output.moved:
            self.reader.on_engine_moved(moved)
        for finished in output.finished:
            self._ended(outboxes, finished.attempt, Ended(finished.attempt, finished.reason.value))
            self.moves.on_finished(finished.attempt)
            self.reader.on_engine_finished(finished.attempt)
        for failed in output.failed:
            reason = STEP if failed.in_step else ""
            ended = Ended(failed.attempt, reason, failed.message, failed.retryable)
            self._ended(outboxes, failed.attempt, ended)
            self.moves.on_failed(failed.attempt, failed.message)
            self.prefill.on_failed(failed.attempt, failed.message)
            self.reader.on_engine_failed(failed.attempt)
        for chunk in output.chunks:
            if chunk.share:
                self.moves.on_chunk(chunk)
                continue
            self.prefill.on_chunk(chunk)
            if chunk.last:  # its token is on its way: from now on it is its reader's
                self._forget(chunk.attempt)
        for reserved in output.reserved:
            self.reader.on_reserved(reserved)

    def _ended(self, outboxes: dict[Link, Outbox], attempt: AttemptId, ended: Ended) -> None:
        link = self._owners.get(attempt)
        self._forget(attempt)
        if link in outboxes:
            outboxes[link].ended.append(ended)

    def _load_report(self) -> LoadReport | None:
        load = self.metrics.load
        if load is None or not self._reports.is_due():
            return None
        return load_report(load, self.role, self.reader.take_moves(), self._loop.time())

    def _on_snapshot(self, link: Link, runs: list[StoredRun]) -> None:
        """On the engine's thread."""
        self._outputs.append(_Chains(link, runs))
        self._loop.call_soon_threadsafe(self._flush)
