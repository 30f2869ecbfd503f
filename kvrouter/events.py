"""From the workers' KV events to the index: streams with gaps, restarts and faults in, a right index out.

Every worker counts its frames from 1 within its epoch (serving.wire.Events). Per worker:

    next frame            applied: cleared, then removed, then stored
    seen before           ignored
    one further ahead     kept aside, a snapshot asked for; the index stays as it is until that comes
    frame 1 of an epoch   needs no snapshot, it is the whole history
    new epoch             forgets what the old one held, at once; late frames of the old one are ignored
    snapshot              replaces what is known; frames kept aside go on from there

A frame that is malformed, contradicts what is known or stores after a block nobody told of leaves the
worker's entry *incomplete*, and a snapshot is asked for. Such a worker cannot make us copy its cache over
and over: the next one is due once its frames carried a quarter of the last snapshot.

A worker that is given prompts to compute and sends no events is *silent*: matches on it come from what was
placed on it (kvrouter/predicted.py), until it speaks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrouter.event_frame import Chain, Frame, limit_bytes, read_chains, read_frame
from kvrouter.index import Contradiction, PrefixIndex
from kvrouter.predicted import PredictedCache
from serving.wire import Events, Snapshot

__all__ = ["CacheEvents", "EventCounters"]

SILENT_S = 30.0
SILENT_PROMPTS = 3  # fewer may have been cancelled before anything was computed
PREDICTED_TTL_S = 120.0
EARLY_FRAMES = 1024  # kept aside while a snapshot is on its way; more, and it is asked for again
OLD_EPOCHS = 8  # remembered per worker


@dataclass(slots=True)
class EventCounters:
    """Since the start, of all workers."""

    frames: int = 0  # applied
    duplicates: int = 0
    gaps: int = 0
    restarts: int = 0
    old_epoch: int = 0  # frames and snapshots of an epoch that ended
    snapshots: int = 0  # applied
    snapshots_asked: int = 0
    orphans: int = 0  # frames with a chain whose parent nobody told of
    contradictions: int = 0
    malformed: int = 0
    unknown_worker: int = 0
    overfull: int = 0  # times that a worker claimed more blocks than it has
    silent: int = 0  # times that a worker became silent


@dataclass(slots=True)
class _Stream:
    """What is known of one worker's frames."""

    total_blocks: int
    predicted: PredictedCache
    epoch: int | None = None
    seq: int | None = None  # last frame applied; None: there is nothing to go on from
    asked: bool = False  # a snapshot is on its way
    incomplete: bool = False  # what the index has is not all, or not right
    early: dict[int, Frame] = field(default_factory=dict)
    early_blocks: int = 0  # in those, at most
    old_epochs: deque[int] = field(default_factory=lambda: deque(maxlen=OLD_EPOCHS))
    snapshot_blocks: int = 0  # of the last snapshot
    told_blocks: int = 0  # since then
    unanswered: int = 0  # prompts placed since the last frame
    unanswered_s: float = 0.0  # when the first of them was

    def restart(self, epoch: int) -> None:
        if self.epoch is not None:
            self.old_epochs.append(self.epoch)
        self.epoch, self.seq = epoch, None
        self.asked = self.incomplete = False
        self.drop_early()
        self.snapshot_blocks = self.told_blocks = 0

    def drop_early(self) -> None:
        self.early.clear()
        self.early_blocks = 0


class CacheEvents:
    """Feeds `index`; what it returns says whether to send a SnapshotRequest. One a variant and frontend."""

    def __init__(
        self,
        index: PrefixIndex | None = None,
        *,
        silent_s: float = SILENT_S,
        predicted_ttl_s: float = PREDICTED_TTL_S,
    ) -> None:
        self.index = PrefixIndex() if index is None else index
        self.counters = EventCounters()
        self._silent_s = silent_s
        self._predicted_ttl_s = predicted_ttl_s
        self._streams: dict[str, _Stream] = {}
        self._silent: set[str] = set()
        self._now_s = 0.0

    # ------------------------------------------------------------ workers

    def add_worker(self, ident: str, total_blocks: int) -> None:
        """Idempotent: what is known of a worker stays."""
        stream = self._streams.get(ident)
        if stream is None:
            predicted = PredictedCache(total_blocks, self._predicted_ttl_s)
            self._streams[ident] = _Stream(total_blocks, predicted)
            self.index.add_worker(ident)
        else:
            stream.total_blocks = total_blocks

    def remove_worker(self, ident: str) -> None:
        """Idempotent."""
        self._streams.pop(ident, None)
        self._silent.discard(ident)
        self.index.remove_worker(ident)

    # ------------------------------------------------------------ looking

    def match(self, hashes: Sequence[int]) -> dict[str, int]:
        """Leading blocks of the chain `hashes` by worker; workers with none are left out."""
        found = self.index.match(hashes)
        for ident in self._silent:
            depth = self._streams[ident].predicted.match(hashes, self._now_s)
            if depth:
                found[ident] = depth
            else:
                found.pop(ident, None)
        return found

    @property
    def silent(self) -> frozenset[str]:
        """Workers that compute prompts and send no events, as of the last `sweep`."""
        return frozenset(self._silent)

    # ------------------------------------------------------------ what the router does

    def placed(self, ident: str, hashes: Sequence[int], cached_blocks: int, now_s: float) -> None:
        """`ident` is to compute a prompt of these blocks, the first `cached_blocks` of which it has."""
        self._now_s = now_s
        stream = self._streams.get(ident)
        if stream is None or len(hashes) <= cached_blocks:  # nothing to compute, nothing to tell
            return
        if not stream.unanswered:
            stream.unanswered_s = now_s
        stream.unanswered += 1
        stream.predicted.add(hashes, now_s)

    def sweep(self, now_s: float) -> list[str]:
        """Call about once a second. Returns the workers that became silent since the last call."""
        self._now_s = now_s
        fresh = [
            ident
            for ident, stream in self._streams.items()
            if stream.unanswered >= SILENT_PROMPTS
            and now_s - stream.unanswered_s >= self._silent_s
            and ident not in self._silent
        ]
        self._silent.update(fresh)
        self.counters.silent += len(fresh)
        return fresh

    # ------------------------------------------------------------ what workers say

    def apply(self, ident: str, epoch: int, events: object) -> bool:
        """A frame arrived (serving.wire.Events). False: ask the worker for a snapshot."""
        stream = self._heard(ident, epoch)
        if stream is None:
            return True
        frame = read_frame(events, limit_bytes(stream.total_blocks))
        if frame is None:
            self.counters.malformed += 1
            return self._spoilt(stream, events)
        if stream.unanswered:
            self._spoke(ident, stream)
        seq = frame.seq
        if stream.seq is None and seq == 1:
            stream.seq = 0
        if stream.seq is None or seq > stream.seq + 1:
            return self._keep(stream, frame)
        if seq <= stream.seq:
            self.counters.duplicates += 1
            return True
        self._take(ident, stream, frame)
        if stream.early:
            self._go_on(ident, stream)
        return not stream.incomplete or self._ask_if_due(stream)

    def snapshot(self, ident: str, epoch: int, message: object) -> bool:
        """A snapshot arrived (serving.wire.Snapshot). False: ask for another one."""
        stream = self._heard(ident, epoch)
        if stream is None:
            return True
        chains = (
            read_chains(message.stored, limit_bytes(stream.total_blocks))
            if isinstance(message, Snapshot)
            else None
        )
        if not isinstance(message, Snapshot) or chains is None or message.seq < 0:
            self.counters.malformed += 1  # asking at once would bring the same one again
            return True
        behind = stream.seq is not None and message.seq < stream.seq
        wanted = stream.asked or stream.incomplete
        if behind or (message.seq == stream.seq and not wanted):
            stream.asked = False
            return not stream.incomplete or self._ask_if_due(stream)
        self.counters.snapshots += 1
        self.index.clear(ident)
        stream.seq = message.seq
        stream.asked = stream.incomplete = False
        stream.snapshot_blocks, stream.told_blocks = sum(len(hashes) for _, hashes in chains), 0
        if not self._store(ident, chains):
            self.counters.orphans += 1  # not incomplete: that is all there is
        self._go_on(ident, stream)
        return not stream.incomplete or self._ask_if_due(stream)

    def _heard(self, ident: str, epoch: int) -> _Stream | None:
        """The stream that a message of `epoch` belongs to; None when it is to be ignored."""
        stream = self._streams.get(ident)
        if stream is None:
            self.counters.unknown_worker += 1
            return None
        if stream.epoch != epoch:
            if epoch in stream.old_epochs:
                self.counters.old_epoch += 1
                return None
            if stream.epoch is not None:
                self.counters.restarts += 1
                self.index.clear(ident)
            stream.restart(epoch)
        return stream

    def _spoke(self, ident: str, stream: _Stream) -> None:
        stream.unanswered = 0
        stream.predicted = PredictedCache(stream.total_blocks, self._predicted_ttl_s)
        self._silent.discard(ident)

    def _spoilt(self, stream: _Stream, events: object) -> bool:
        """A malformed frame: if it was the next one, its content is lost and the stream goes on."""
        stream.told_blocks += 1
        stream.incomplete = True
        if isinstance(events, Events) and stream.seq is not None and events.seq == stream.seq + 1:
            stream.seq = events.seq
        return self._ask_if_due(stream)

    def _keep(self, stream: _Stream, frame: Frame) -> bool:
        """A frame that cannot be applied yet."""
        if len(stream.early) >= EARLY_FRAMES or stream.early_blocks > stream.total_blocks:
            stream.drop_early()
            stream.asked = False
        stream.early[frame.seq] = frame
        stream.early_blocks += frame.blocks
        if stream.asked:
            return True
        self.counters.gaps += 1
        return self._ask(stream)

    def _go_on(self, ident: str, stream: _Stream) -> None:
        """Apply the frames kept aside that are next, forget those that are past."""
        assert stream.seq is not None
        for seq in sorted(stream.early):
            if seq <= stream.seq:
                del stream.early[seq]
            elif seq == stream.seq + 1:
                self._take(ident, stream, stream.early.pop(seq))
        if not stream.early:
            stream.early_blocks = 0

    def _take(self, ident: str, stream: _Stream, frame: Frame) -> None:
        """Apply the next frame."""
        self.counters.frames += 1
        stream.seq = frame.seq
        stream.told_blocks += frame.blocks
        if frame.cleared:
            self.index.clear(ident)
            stream.incomplete = False
        if frame.removed:
            self.index.remove(ident, frame.removed)
        if not self._store(ident, frame.chains):
            self.counters.orphans += 1
            stream.incomplete = True
        if self.index.n_held(ident) > stream.total_blocks:
            self.counters.overfull += 1
            stream.incomplete = True

    def _store(self, ident: str, chains: list[Chain]) -> bool:
        """False when the index is not all right afterwards."""
        right = True
        for parent, hashes in chains:
            try:
                right = self.index.store(ident, parent, hashes) and right
            except Contradiction:
                self.counters.contradictions += 1
                right = False
        return right

    def _ask(self, stream: _Stream) -> bool:
        stream.asked = True
        self.counters.snapshots_asked += 1
        return False

    def _ask_if_due(self, stream: _Stream) -> bool:
        """For faults that another snapshot may not cure. False: ask now."""
        if stream.asked or stream.told_blocks * 4 < stream.snapshot_blocks:
            return True
        return self._ask(stream)
