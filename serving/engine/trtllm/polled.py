"""What is only known by asking the engine: its KV events and its statistics, and what they add up to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from serving.engine.base import BlockHash, BlockStates, Counters, StoredRun
from serving.engine.trtllm.events import EventTranslator
from serving.engine.trtllm.poller import Poller
from serving.engine.trtllm.stats import Reading, StatsReader

log = logging.getLogger("kvrelay.engine")

EVENTS_PERIOD_S = 0.01
STATS_PERIOD_S = 0.05
SILENT_PROMPTS = 32

Steps = list[tuple[list[StoredRun], list[BlockHash]]]


class Polled:
    """`start` and `stop` are a pair. `post` brings a call to the engine's thread, where all else belongs;
    there `on_events` gets what changed, and `on_step` is told of an iteration."""

    def __init__(
        self,
        *,
        llm: Any,
        events: EventTranslator,
        total_blocks: int,
        counters: Counters,
        post: Callable[[Callable[[], object]], None],
        on_events: Callable[[Steps], None],
        on_step: Callable[[], None],
    ) -> None:
        self.events = events
        self.reading: Reading | None = None
        self._total_blocks = total_blocks
        self._counters = counters
        self._prompts = 0
        self._stats = StatsReader()
        self._post = post
        self._on_events = on_events
        self._on_step = on_step
        self._pollers = [
            Poller("events", llm.get_kv_cache_events_async, self._got_events, period_s=EVENTS_PERIOD_S),
            Poller("stats", llm.get_stats_async, self._got_stats, period_s=STATS_PERIOD_S),
        ]

    def start(self) -> None:
        for poller in self._pollers:
            poller.start()

    def stop(self) -> None:
        for poller in self._pollers:
            poller.stop()

    def blocks(self) -> BlockStates:
        """As of the last statistics; what is cached counts as free, and nothing tells the two apart."""
        reading = self.reading
        total = self._total_blocks if reading is None or not reading.total_blocks else reading.total_blocks
        used = 0 if reading is None else min(reading.used_blocks, total)
        return BlockStates(total, used, 0, 0, 0, total - used)

    @property
    def free_blocks(self) -> int | None:
        return None if self.reading is None else self.blocks().free

    def expect_events(self) -> None:
        """A prompt with whole blocks was computed: there is something to tell. Silence is told, once."""
        self._prompts += 1
        if self._prompts == SILENT_PROMPTS and not self.events.seen:
            log.warning(
                "%d prompts were computed and the engine told no KV event: "
                "the router goes by its own predictions for this worker",
                self._prompts,
            )

    # On the pollers' threads: what is no event and no row is an error of theirs.

    def _got_events(self, items: list[Mapping[str, Any]]) -> None:
        self._post(lambda: self._take_events(items))

    def _got_stats(self, items: list[Mapping[str, Any]]) -> None:
        reading = self._stats.read(items)
        if reading is not None:
            self._post(lambda: self._take_reading(reading))

    # On the engine's.

    def _take_events(self, items: list[Mapping[str, Any]]) -> None:
        self._on_events(self.events.translate(items))
        counts = self.events.counts
        self._counters.event_gaps = counts["gaps"] + counts["malformed"]
        self._count_errors()

    def _take_reading(self, reading: Reading) -> None:
        before, self.reading = self.reading, reading
        counters, totals = self._counters, self._stats.totals
        counters.steps = totals.iterations
        counters.prefill_seconds, counters.decode_seconds = totals.prefill_seconds, totals.decode_seconds
        self._count_errors()
        if before is None or reading.iteration != before.iteration:
            self._on_step()

    def _count_errors(self) -> None:
        self._counters.poll_errors = sum(poller.errors for poller in self._pollers)
