"""What a frontend counts of one variant's requests and router; no label value is taken from a client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict

from kvrouter.events import CacheEvents
from serving.length_lanes import LANES
from serving.metrics import TOKEN_BUCKETS, Labels, Registry

DECISION_BUCKETS = (0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)

# A move costs a part of a step: told apart in steps of 5 ms where its target is.
GAP_BUCKETS = (
    0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.045, 0.05, 0.06, 0.08, 0.1, 0.15, 0.3, 1, 3, 10
)  # fmt: skip


class FrontendMetrics:
    def __init__(self, registry: Registry) -> None:
        self.requests = registry.counter("requests", "Requests ended, by outcome", ("outcome",))
        self.rejects = registry.counter("admission_rejects", "Requests refused, by reason", ("reason",))
        self.ttft = registry.histogram("ttft_seconds", "From admission to the first token")
        self.itl = registry.histogram("itl_seconds", "Between tokens of a stream, as they arrive")
        self.tpot = registry.histogram("tpot_seconds", "Request duration over its output tokens")
        self.decision = registry.histogram("router_decision_seconds", "One placement", DECISION_BUCKETS)
        self.regret = registry.histogram("router_regret_seconds", "Compute given up for a shorter wait")
        self.predicted_ttft = registry.histogram("predicted_ttft_seconds", "TTFT, as predicted")
        self.ttft_error = registry.histogram("ttft_error_seconds", "Predicted against actual TTFT")
        self.predicted_wait = registry.histogram(
            "predicted_wait_seconds", "Until its prompt would begin, of every request that admission judged"
        )
        self._lanes: Callable[[], Counter[str]] | None = None
        registry.gauge("admission_queue", "Prompts admitted and not computed", self._queued, ("lane",))
        self.queue = registry.histogram("queue_seconds", "From admission until a worker scheduled it")
        self.e2e = registry.histogram("request_seconds", "From admission to the end")
        self.prompt_tokens = registry.histogram("prompt_tokens", "Prompt lengths", TOKEN_BUCKETS)
        self.output_tokens = registry.histogram("output_tokens", "Output lengths", TOKEN_BUCKETS)
        self.hit_tokens = registry.counter("prefix_hit_tokens", "Prompt tokens found in a cache")
        self.resumes = registry.counter("resumes", "Requests that went on after an attempt failed")
        self.requeued = registry.counter(
            "requeued", "Prompts that waited on one worker and went to another one that was free"
        )
        self.attempt_failures = registry.counter("attempt_failures", "Attempts that failed")
        self.retries_refused = registry.counter(
            "retries_refused", "Failed attempts that were not tried elsewhere, by reason", ("reason",)
        )
        self.breaker_openings = registry.counter(
            "breaker_openings", "Workers that failed requests in a row and are avoided for a while"
        )
        self.migrations = registry.counter(
            "migrations", "Streams moved to another decode worker with their KV, by outcome", ("outcome",)
        )
        self.migration_gap = registry.histogram(
            "migration_gap_seconds",
            "From the last token of the old worker to the first of the new one",
            GAP_BUCKETS,
        )
        self.deadlines = registry.counter("deadlines_exceeded", "Deadlines passed, by stage", ("stage",))
        self._caches: CacheEvents | None = None
        self._events = registry.counter(
            "router_events", "KV event frames applied, and what was wrong with others", ("kind",)
        )
        self._evicted = registry.counter(
            "router_index_evicted_blocks", "Blocks the index forgot for want of room"
        )
        registry.gauge("router_index_blocks", "Distinct blocks in the index", self._blocks)
        registry.gauge("router_index_bytes", "Memory of the index, estimated", self._bytes)
        registry.gauge("router_silent_workers", "Workers without KV events", self._silent)
        registry.before_snapshot(self._copy_events)

    def watch(self, caches: CacheEvents) -> None:
        """Show what the router heard of its workers' caches."""
        self._caches = caches

    def watch_lanes(self, queued: Callable[[], Counter[str]]) -> None:
        """`queued`: prompts by lane."""
        self._lanes = queued

    def _queued(self) -> dict[Labels, float]:
        if self._lanes is None:
            return {}
        queued = self._lanes()
        return {(lane,): queued[lane] for lane in LANES}

    def _copy_events(self) -> None:
        if self._caches is not None:
            for kind, count in asdict(self._caches.counters).items():
                self._events.set_total(count, (kind,))
            self._evicted.set_total(self._caches.index.stats.evicted)

    def _blocks(self) -> dict[Labels, float]:
        return {} if self._caches is None else {(): self._caches.index.stats.blocks}

    def _bytes(self) -> dict[Labels, float]:
        return {} if self._caches is None else {(): self._caches.index.stats.memory_bytes}

    def _silent(self) -> dict[Labels, float]:
        return {} if self._caches is None else {(): len(self._caches.silent)}
