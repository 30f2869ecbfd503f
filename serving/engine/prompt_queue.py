"""Which prompts hold blocks and compute, by the order in which they are due. Pure.

A prompt starts when it is its turn to compute and blocks for all of it can be held. Then every step gives
its tokens out in due order anew, so a prompt that is due earlier overtakes one that is half done, which
keeps its blocks ("parked"). If the earlier one lacks blocks, those due later give theirs back, the latest
first and only if that is enough: what they computed stays in the cache, and they wait for a new start.

Blocks that a reader was told of (`announced`) are never given back: it may be reading them. Such a prompt
is shortened to them and goes on from there once the rest is there again.

Why everybody gets done:
  - Due times and arrival numbers make a total order that does not change (a preempted decode moves up,
    once). Blocks are only taken from who stands later. So in the list of those that hold all their blocks,
    sorted by that order, every taking adds one before those it drops: a strict lexicographic increase.
    No two prompts can take from each other in turn, and the first one keeps what it has.
  - Who holds all its blocks needs nothing more to get its first token, and computes whenever those before
    it do not.
  - While one waits for blocks, nobody after it starts, so what is given back gathers for it. The exception
    are shortened prompts, who pin blocks until they end: any of them may go on if its rest is there. When
    nothing else is held, at least one can: the last to be shortened was whole beside the pins of the
    others, and those have not grown since, because pins only grow while whole.
  - A pull holds its blocks while nobody can take them, for as long as its reader waits, which has an end.
    Then it is started, and what was said of those holds for it.
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
    """All sequences in WAITING and PREFILL, and pulls in RESERVED. `add` and `remove` are a pair."""

    def __init__(self, tables: BlockTables, counters: Counters) -> None:
        self.todo = 0  # tokens still to compute here: the sum of `left`
        self._tables = tables
        self._counters = counters
        self._prompts: list[LiveSequence] = []  # in order: to compute here, started or not
        self._remote: list[LiveSequence] = []  # in order: waiting for room for a peer's KV
        self._started: list[LiveSequence] = []  # those of `_prompts` in PREFILL
        self._shortened: list[LiveSequence] = []  # those of them that wait and hold what they announced
        self._preempted: dict[AttemptId, None] = {}  # those of them that decoded before

    def __bool__(self) -> bool:
        return bool(self._prompts or self._remote)

    @property
    def n_started(self) -> int:
        return len(self._started)

    @property
    def runnable(self) -> bool:
        """There is a prompt to go on with, or one that can start if no decode runs."""
        if self._started:
            return True
        available = self._tables.available
        heads = self._remote[:1] + self._prompts[:1]
        if heads and min(heads).wants <= available:
            return True
        return any(seq.wants <= available for seq in self._shortened)

    def first(self) -> list[tuple[AttemptId, int, float]]:
        """Attempt, tokens left and due time of the first `MOST_TOLD`."""
        return [(seq.attempt, seq.left, seq.due_s) for seq in self._prompts[:MOST_TOLD]]

    def parked(self, ready: list[LiveSequence]) -> list[AttemptId]:
        """See Load: decodes that gave way, until they are back, `ready` ones, and whose KV a peer has."""
        if not (self._preempted or ready or self._remote):
            return []
        waiting = (seq.attempt for seq in chain(ready, self._remote))
        return list(islice(chain(self._preempted, waiting), MOST_PARKED))

    def add(self, seq: LiveSequence) -> None:
        """`seq` waits; `due_s`, `number` and `left` are set."""
        seq.stage = Stage.WAITING
        insort(self._remote if seq.remote else self._prompts, seq)
        self.todo += seq.left
        if seq.begun:
            self._preempted[seq.attempt] = None

    def remove(self, seq: LiveSequence) -> None:
        """Its prompt is done, or it is over; its blocks are the caller's to free."""
        self._preempted.pop(seq.attempt, None)
        if seq.stage is not Stage.RESERVED:
            (self._remote if seq.remote else self._prompts).remove(seq)
            if seq.stage is Stage.PREFILL:
                self._started.remove(seq)
            elif seq.blocks:
                self._shortened.remove(seq)
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
        if not self._remote:
            return reserved
        first = next((seq for seq in self._prompts if seq.stage is Stage.WAITING), None)
        while self._remote:
            seq = self._remote[0]
            if first is not None and first.wants and first < seq:
                break  # it lacked blocks and is before
            if not self._hold(seq):
                break
            del self._remote[0]
            seq.stage = Stage.RESERVED
            reserved.append(seq)
        return reserved

    def pulled(self, seq: LiveSequence) -> None:
        """Its pull is over, in WAITING or RESERVED; from now on it is a prompt like any other.

        In RESERVED it holds its blocks, so it is started, whoever is due before it.
        """
        waits = seq.stage is Stage.WAITING
        if waits:
            self._remote.remove(seq)
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
        unseen = len(self._started) + len(self._shortened)  # that hold blocks
        for seq in self._prompts:
            if seq.blocks:
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
                stuck = stuck or bool(self._remote and self._remote[0] < seq)
                if (stuck and not seq.blocks) or not self._hold(seq):
                    stuck = True
                    continue
                self._start(seq)
            count = min(seq.n_remaining, budget)
            pieces.append(PrefillSlice(seq, seq.computed, count))
            budget -= count
        return pieces

    def _start(self, seq: LiveSequence) -> None:
        if seq in self._shortened:
            self._shortened.remove(seq)
        seq.stage = Stage.PREFILL
        self._started.append(seq)
        self._expect(seq, seq.n_remaining)

    def _hold(self, seq: LiveSequence) -> bool:
        """Blocks for all of `seq`, if need be from prompts due later; those never have a slice yet."""
        if self._tables.start(seq):
            return True
        later = sorted((other for other in self._started if seq < other), reverse=True)
        if not later:
            return False
        for other in later[: self._tables.givers(seq, later)]:
            self._give_back(other)
        return self._tables.start(seq)

    def _give_back(self, seq: LiveSequence) -> None:
        seq.stage = Stage.WAITING
        self._started.remove(seq)
        self._counters.preemptions += 1
        self._expect(seq, self._tables.give_back(seq))
        if seq.blocks:
            self._shortened.append(seq)

    def _expect(self, seq: LiveSequence, left: int) -> None:
        self.todo += left - seq.left
        seq.left = left
