"""From the engine's iteration statistics to a load: what is not told is None, never 0.

Fields about queued prompts came late (TensorRT-LLM #13199). Whether they are there is seen in the first row
that could have them; without them the engine's user counts what it sent itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Reading:
    """Over all attention-DP ranks, after their latest iterations."""

    iteration: int
    step_ms: float
    active: int
    queued: int
    total_blocks: int
    used_blocks: int
    prompt_tokens: int | None  # computed by that iteration
    decoding: int | None  # sequences that drew a token
    queued_prompt_tokens: int | None


@dataclass(slots=True)
class Totals:
    """Over all rows so far."""

    iterations: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


class StatsReader:
    """Feed it rows in order. Raises KeyError, TypeError for a row that is none."""

    def __init__(self) -> None:
        self.totals = Totals()
        self.has_queue_fields: bool | None = None  # None: no row told yet
        self._rows: dict[int, Mapping[str, Any]] = {}

    def read(self, rows: Iterable[Mapping[str, Any]]) -> Reading | None:
        """The state after the last row; None without any."""
        for row in rows:
            self._rows[row.get("attentionDpRank") or 0] = row
            self._count(row)
        if not self._rows:
            return None
        first = self._rows[min(self._rows)]  # queues are told by one rank alone
        ranks = list(self._rows.values())
        batches = [b for row in ranks if (b := row.get("inflightBatchingStats")) is not None]
        caches = [c for row in ranks if (c := row.get("kvCacheStats")) is not None]
        queue = first.get("inflightBatchingStats") or {}
        return Reading(
            iteration=max(int(row["iter"]) for row in ranks),
            step_ms=float(first["iterLatencyMS"]),
            active=sum(int(row["numActiveRequests"]) for row in ranks),
            queued=int(first["numQueuedRequests"]),
            total_blocks=sum(int(c["maxNumBlocks"]) for c in caches),
            used_blocks=sum(int(c["usedNumBlocks"]) for c in caches),
            prompt_tokens=sum(int(b["numCtxTokens"]) for b in batches) if batches else None,
            decoding=sum(int(b["numGenRequests"]) for b in batches) if batches else None,
            queued_prompt_tokens=int(queue["numQueuedCtxTokens"])
            if "numQueuedCtxTokens" in queue
            else None,
        )

    def _count(self, row: Mapping[str, Any]) -> None:
        totals, seconds = self.totals, float(row["iterLatencyMS"]) / 1e3
        totals.iterations += 1
        batch = row.get("inflightBatchingStats")
        if batch is None:
            return
        if self.has_queue_fields is None:
            self.has_queue_fields = "numQueuedCtxTokens" in batch
        prompt, drawn = int(batch["numCtxTokens"]), int(batch["numGenRequests"])
        share = prompt / (prompt + drawn) if prompt + drawn else 0.0
        totals.prefill_seconds += seconds * share
        totals.decode_seconds += seconds * (1 - share)
