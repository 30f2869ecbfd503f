"""The owner's side of a live hand-off: a request that decodes here goes on at another worker, with its KV.

    Attach -> share: Chunk, not the last one   | it decodes on while its full blocks are read
    Ready  -> pause: the last Chunk            | the tokens drawn since, the blocks computed since
    Confirm -> Confirmed, release, `on_moved`  | it is over here
            -> Refused, resume                 | it goes on here as if nothing had happened

Until it is confirmed the reader may not go on with it, and once it is, nothing resumes it here: so nobody
ever draws a token twice. The reader's side is `decode.role`. One event loop, no Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import cast

from decode.counters import MoveCounters
from serving.config import Deadlines
from serving.engine.base import AttemptId, ChunkReady, Engine, MigratingEngine
from serving.kv.io import KvIo
from serving.kv.peer_link import PeerLink
from serving.wire import (
    AnyMessage,
    Attach,
    Chunk,
    Confirm,
    Confirmed,
    Detach,
    Ready,
    Refused,
    Renew,
    pack_u32,
)

LEASES_PER_TRANSFER = 2  # a lease outlives the reader's own transfer deadline
# The longest pause. A reader needs some ten milliseconds; one that needs a second is in trouble, and the
# client has waited for long. Much below the silence that a frontend takes for a fault.
PAUSE_S = 1.0


class _State(Enum):
    SHARED = "shared"  # asked of the engine
    COPIED = "copied"  # the reader reads what was told
    STOPPING = "stopping"  # a pause was asked of the engine
    PAUSED = "paused"  # the reader reads the rest, and confirms


@dataclass(slots=True)
class _Move:
    attempt: AttemptId
    reader: PeerLink
    first: int  # the reader needs blocks from here on
    generation: int  # of its lease, and the serial of its share
    state: _State = _State.SHARED
    timer: asyncio.TimerHandle | None = None
    paused_s: float = 0.0


class MoveRole:
    """Give it all that concerns attempts that decode here. One move of an attempt at a time.

    `runs(attempt)`: it was given to the engine to decode, and has not ended. `on_moved(attempt)` is called
    once its reader goes on with it; `on_pause(seconds)` when a pause has ended, whatever the end.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        kv_io: KvIo,
        deadlines: Deadlines,
        runs: Callable[[AttemptId], bool],
        on_moved: Callable[[AttemptId], None],
        on_pause: Callable[[float], None],
        pause_s: float = PAUSE_S,
    ) -> None:
        self.counters = MoveCounters()
        self._engine = cast(MigratingEngine, engine)  # where its capabilities say so
        self._kv_io = kv_io
        self._lease_s = LEASES_PER_TRANSFER * deadlines.transfer_ms / 1e3
        self._pause_s = min(pause_s, deadlines.transfer_ms / 1e3)
        self._runs = runs
        self._on_moved = on_moved
        self._on_pause = on_pause
        self._moves: dict[AttemptId, _Move] = {}
        self._last_generation = 0

    @property
    def idle(self) -> bool:
        return not self._moves

    def stop(self) -> None:
        """The engine is about to stop."""
        for move in list(self._moves.values()):
            self._give_up(move, "stopped", "the worker stops")

    # -- the reader's side

    def on_message(self, link: PeerLink, message: AnyMessage) -> bool:
        """False if the message is none about an attempt that decodes here."""
        match message:
            case Attach():
                attempt = AttemptId(message.attempt)
                if not message.n_tokens and not self._runs(attempt):
                    return False
                self._attach(link, attempt, message)
            case Ready() | Renew() | Confirm() | Detach():
                move = self._moves.get(AttemptId(message.attempt))
                if move is None or move.reader is not link:
                    return isinstance(message, Ready)  # too late
                self._on_word(move, message)
            case _:
                return False
        return True

    def on_reader_lost(self, link: PeerLink) -> None:
        for move in [move for move in self._moves.values() if move.reader is link]:
            self._give_up(move, "reader_lost", "its reader is gone")

    def _attach(self, link: PeerLink, attempt: AttemptId, asked: Attach) -> None:
        why = None
        if attempt in self._moves:
            why = "another reader has it"
        elif not asked.n_tokens or not self._runs(attempt):
            why = "not running" if asked.n_tokens else "it decodes here, and its reader does not know that"
        elif not self._engine.capabilities.migrate_kv:
            why = "this engine hands nothing over that decodes"
        if why is not None:
            self.counters.count("refused")
            link.send(Refused(attempt, why))
            return
        self._last_generation += 1
        move = self._moves[attempt] = _Move(attempt, link, asked.first, self._last_generation)
        self._limit(move, self._lease_s, "its reader was silent")
        self._kv_io.attend(attempt)
        most_tokens = asked.n_tokens + asked.reserve_tokens
        self._engine.share(attempt, move.generation, asked.n_tokens, most_tokens)

    def _on_word(self, move: _Move, message: Ready | Renew | Confirm | Detach) -> None:
        if isinstance(message, Detach):
            self._give_up(move, "detached", None)
        elif message.generation != move.generation:
            self._give_up(move, "refused", "that lease is not whole")
        elif isinstance(message, Renew):
            if move.state is not _State.PAUSED:  # a pause is not prolonged
                self._limit(move, self._lease_s, "its reader was silent")
        elif isinstance(message, Ready):
            if move.state is _State.COPIED:
                self._pause(move)
        elif move.state is _State.PAUSED:
            move.reader.send(Confirmed(move.attempt, move.generation))
            self._forget(move, "moved")
            self._engine.release(move.attempt)
            self._on_moved(move.attempt)
        else:
            self._give_up(move, "refused", "it has not had the last chunk")

    def _pause(self, move: _Move) -> None:
        move.state = _State.STOPPING
        self._engine.pause(move.attempt)

    # -- the engine's side

    def on_chunk(self, chunk: ChunkReady) -> None:
        """A chunk of a share; those of a move that was given up are ignored."""
        move = self._moves.get(chunk.attempt)
        if move is None or move.generation != chunk.share:
            return
        if chunk.last and chunk.token is None:
            self._give_up(move, "refused", "not running")
            return
        skip = min(max(0, move.first - chunk.first), len(chunk.blocks))
        lease_s = self._lease_s
        if chunk.last:
            move.state = _State.PAUSED
            move.paused_s = asyncio.get_running_loop().time()
            lease_s = self._pause_s
            self._limit(move, lease_s, "its reader did not confirm in time")
        elif skip == len(chunk.blocks):  # nothing to read before the pause
            self._pause(move)
            return
        else:
            move.state = _State.COPIED
        move.reader.send(
            Chunk(
                move.attempt,
                chunk.first + skip,
                pack_u32([int(block) for block in chunk.blocks[skip:]]),
                chunk.last,
                move.generation,
                int(lease_s * 1e3),
                chunk.token,
                pack_u32(chunk.tokens),
            )
        )

    def on_finished(self, attempt: AttemptId) -> None:
        """It came to its end here: its reader has nothing to do."""
        move = self._moves.get(attempt)
        if move is not None:
            move.reader.send(Chunk(attempt, 0, b"", True, generation=0, lease_ms=0))
            self._forget(move, "finished")

    def on_failed(self, attempt: AttemptId, message: str) -> None:
        """The engine failed it. Unknown attempts are ignored."""
        self._over(attempt, "failed", f"it failed: {message}")

    def cancel(self, attempt: AttemptId) -> None:
        """The request is over; the caller cancels it in the engine. Idempotent."""
        self._over(attempt, "cancelled", "cancelled")

    # -- ends

    def _over(self, attempt: AttemptId, outcome: str, reason: str) -> None:
        move = self._moves.get(attempt)
        if move is not None:
            move.reader.send(Refused(attempt, reason))
            self._forget(move, outcome)

    def _give_up(self, move: _Move, outcome: str, reason: str | None) -> None:
        """The reader gets nothing, and is told why unless it left; the attempt goes on here."""
        if reason is not None:
            move.reader.send(Refused(move.attempt, reason))
        self._forget(move, outcome)
        self._engine.resume(move.attempt)

    def _limit(self, move: _Move, seconds: float, reason: str) -> None:
        """Give up after that, unless told otherwise until then."""
        if move.timer is not None:
            move.timer.cancel()
        loop = asyncio.get_running_loop()
        move.timer = loop.call_later(seconds, self._give_up, move, "expired", reason)

    def _forget(self, move: _Move, outcome: str) -> None:
        """The one place where a move ends."""
        del self._moves[move.attempt]
        if move.timer is not None:
            move.timer.cancel()
        self._kv_io.dismiss(move.attempt)
        self.counters.count(outcome)
        if move.state is _State.PAUSED:
            self._on_pause(asyncio.get_running_loop().time() - move.paused_s)
