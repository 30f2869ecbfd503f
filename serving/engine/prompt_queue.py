"""Which prompts hold blocks and compute, by the order in which they are due. Pure.

A prompt starts when it is its turn to compute and blocks for all of it can be held. Then every step gives
its tokens out in due order anew, so a prompt that is due earlier overtakes one that is half done, which
keeps its blocks ("parked"). If the earlier one lacks blocks, those due later give theirs back, the latest
first and only if that is enough: what they computed stays in the cache, and they wait for a new start.

A prompt of which a reader was told blocks (`announced`) gives none back: they may be read right now.

KV that comes from a peer needs room here too. It is reserved ahead, so that a read can begin with the first
chunk that the peer announces. Until then it is on loan: whoever waits for room takes it back, whatever is
due when, and nothing is lent out meanwhile.

Why everybody gets done:
  - Due times and arrival numbers make a total order that does not change (a preempted decode moves up,
    once). What is not on loan is only taken from who stands later. So in the list of those that hold
    all their blocks, sorted by that order, every taking adds one before those it drops: a strict
    lexicographic increase. No two prompts can take from each other in turn, and the first one keeps what
    it has.
  - Who holds all its blocks needs nothing more to get its first token, and computes whenever those before
    it do not.
  - While one waits for blocks, nobody after it starts, so what is given back gathers for it.
  - A pull holds its blocks while nobody can take them, for as long as its reader waits, which has an end.
    Then it is started, and what was said of those holds for it.
  - A peer that has begun with a prompt holds all the blocks it needs for that, and until they are read. So
    who keeps room here for its KV waits for nothing but that, and who waits at the peer for blocks keeps no
    room here that anybody needs: no circle of waits goes through two workers.
  - Decodes are preempted for each other's next token (Scheduler), so at most as often as tokens are drawn.
"""

from __future__ import annotations

from bisect import insort
from itertools import chain, islice

from serving.engine.base import MOST_PARKED, AttemptId, Counters
from serving.engine.live_sequence import BlockTables, LiveSequence, Stage
from serving.engine.sequence import PrefillSlice

MOST_TOLD = 64  # prompts in a load report


class PromptQueue:
    """All sequences in WAITING and PREFILL, and what is on loan. `add` and `remove` are a pair."""

    def __init__(self, tables: BlockTables, counters: Counters) -> None:
        self.todo = 0  # tokens still to compute here: the sum of `left`
        self._tables = tables
        self._counters = counters
        self._prompts: list[LiveSequence] = []  # in order: to compute here, started or not
        self._there: list[LiveSequence] = []  # in order: waiting for room for KV that a peer has
        self._coming: list[LiveSequence] = []  # in order: for KV that no peer has begun with
        self._loans: dict[AttemptId, LiveSequence] = {}  # in RESERVED, and may have been claimed since
        self._started: list[LiveSequence] = []  # those of `_prompts` in PREFILL
        self._preempted: dict[AttemptId, None] = {}  # those of them that decoded before

    def __bool__(self) -> bool:
        return bool(self._prompts or self._there or self._coming)

    @property
    def n_started(self) -> int:
        return len(self._started)

    @property
    def runnable(self) -> bool:
        """There is a prompt to go on with, or one that can start if no decode runs."""
        if self._started:
            return True
        available = self._tables.available
        heads = self._there[:1] + self._prompts[:1]
        if not heads:
            return bool(self._coming) and self._coming[0].wants <= available
        return min(heads).wants <= available + sum(len(seq.blocks) for seq in self._loans.values())

    def first(self) -> list[tuple[AttemptId, int, float]]:
        """Attempt, tokens left and due time of the first `MOST_TOLD`."""
        return [(seq.attempt, seq.left, seq.due_s) for seq in self._prompts[:MOST_TOLD]]

    def parked(self, ready: list[LiveSequence]) -> list[AttemptId]:
        """See Load: decodes that gave way, until they are back, `ready` ones, and whose KV a peer has."""
        if not (self._preempted or ready or self._there):
            return []
        waiting = (seq.attempt for seq in chain(ready, self._there))
        return list(islice(chain(self._preempted, waiting), MOST_PARKED))

    def add(self, seq: LiveSequence) -> None:
        """`seq` waits; `due_s`, `number` and `left` are set."""
        seq.stage = Stage.WAITING
        insort(self._queue_of(seq), seq)
        self.todo += seq.left
        if seq.begun:
            self._preempted[seq.attempt] = None

    def remove(self, seq: LiveSequence) -> None:
        """Its prompt is done, or it is over; its blocks are the caller's to free."""
        self._preempted.pop(seq.attempt, None)
        if seq.stage is Stage.RESERVED:
            self._loans.pop(seq.attempt, None)
        else:
            self._queue_of(seq).remove(seq)
            if seq.stage is Stage.PREFILL:
                self._started.remove(seq)
        self.todo -= seq.left
        seq.left = 0

    def advance(self, seq: LiveSequence, count: int) -> None:
        """`count` tokens of it were computed."""
        seq.computed += count
        seq.left -= count
        self.todo -= count

    def reserve(self) -> list[LiveSequence]:
        """Those whose KV comes from a peer and that hold their blocks from now on, in RESERVED."""
        reserved: list[LiveSequence] = []
        if not (self._there or self._coming):
            return reserved
        first = next((seq for seq in self._prompts if seq.stage is Stage.WAITING), None)
        if first is not None and not first.wants:
            first = None  # it did not lack blocks so far
        while self._there and (first is None or self._there[0] < first) and self._hold(self._there[0]):
            reserved.append(self._there.pop(0))
        # Only then on loan, and to nobody while one waits who would take it back.
        if first is None and not self._there:
            while self._coming and self._tables.start(self._coming[0]):
                seq = self._coming.pop(0)
                self._loans[seq.attempt] = seq
                reserved.append(seq)
        for seq in reserved:
            seq.stage = Stage.RESERVED
        return reserved

    def begun(self, seq: LiveSequence) -> None:
        """A peer has some of its KV. Nothing but a mark where it waits for no room."""
        waits = seq.stage is Stage.WAITING and seq.remote
        if waits:
            self._coming.remove(seq)
        self._loans.pop(seq.attempt, None)
        seq.there = True
        if waits:
            insort(self._there, seq)

    def arrived(self, seq: LiveSequence) -> None:
        """All its KV is here: it leaves RESERVED."""
        self._loans.pop(seq.attempt, None)

    def take_back(self) -> bool:
        """The blocks on loan to the last one in order; False if none are."""
        while self._loans:
            seq = max(self._loans.values())
            del self._loans[seq.attempt]
            assert seq.offer is not None
            if seq.offer.claim():
                self._tables.give_back(seq)
                self.add(seq)
                return True
        return False

    def pulled(self, seq: LiveSequence) -> None:
        """Its pull is over, in WAITING or RESERVED; from now on it is a prompt like any other.

        In RESERVED it holds its blocks, so it is started, whoever is due before it.
        """
        waits = seq.stage is Stage.WAITING
        if waits:
            self._there.remove(seq)
        seq.remote = False
        insort(self._prompts, seq)
        if waits:
            self._expect(seq, self._tables.uncached(seq))
        else:
            self._start(seq)

    def slices(self, places: int, budget: int, ready: list[LiveSequence]) -> list[PrefillSlice]:
        """What prompts compute of `budget` tokens in `places` of the batch, started if need be.

        `ready` (in order) want places too: those due before a prompt get theirs before it.
        """
        pieces: list[PrefillSlice] = []
        ahead = 0
        stuck = False  # one before lacks blocks
        unseen = len(self._started)
        for seq in self._prompts:
            if seq.stage is Stage.PREFILL:
                unseen -= 1
            elif stuck:
                if not unseen:
                    break
                continue
            while ahead < len(ready) and ready[ahead] < seq:
                ahead += 1
            if budget <= 0 or ahead + len(pieces) >= places:
                break
            if seq.stage is Stage.WAITING:
                stuck = bool(self._there and self._there[0] < seq)
                if stuck or not self._hold(seq):
                    stuck = True
                    continue
                self._start(seq)
            count = min(seq.n_remaining, budget)
            pieces.append(PrefillSlice(seq, seq.computed, count))
            budget -= count
        return pieces

    def _start(self, seq: LiveSequence) -> None:
        seq.stage = Stage.PREFILL
        self._started.append(seq)
        self._expect(seq, seq.n_remaining)

    def _hold(self, seq: LiveSequence) -> bool:
        """Blocks for all of `seq`, if need be those on loan, then from prompts due later."""
        while not self._tables.start(seq):
            if not self.take_back():
                return self._hold_of_later(seq)
        return True

    def _hold_of_later(self, seq: LiveSequence) -> bool:
        """They never have a slice of this step yet."""
        later = sorted((o for o in self._started if seq < o and not o.announced), reverse=True)
        for other in later[: self._tables.givers(seq, later)]:
            self._give_back(other)
        return self._tables.start(seq)

    def _give_back(self, seq: LiveSequence) -> None:
        seq.stage = Stage.WAITING
        self._started.remove(seq)
        self._counters.preemptions += 1
        self._expect(seq, self._tables.give_back(seq))

    def _queue_of(self, seq: LiveSequence) -> list[LiveSequence]:
        """Where it waits."""
        if not seq.remote:
            return self._prompts
        return self._there if seq.there else self._coming

    def _expect(self, seq: LiveSequence, left: int) -> None:
        self.todo += left - seq.left
        seq.left = left
