"""What a fault may cost, and the line that says so when it cost more."""

from __future__ import annotations

from typing import Any

from benchmarks.fault_app import STEP_MS, Setup
from benchmarks.fault_scenarios import Fault

KILL_GAP_MS = 150.0  # over a step
FREEZE_GAP_MS = 150.0  # over the silence deadline
MIGRATION_PAUSE_MS = 30.0  # over a step
REPREFILL = 1.5  # of the time that the lost prompts take anew
COLUMNS = (
    "streams",
    "completed",
    "lost",
    "repeated",
    "wrong_usage",
    "max_gap_ms",
    "other_errors",
    "leaked_blocks",
)
ZERO = (
    "lost",
    "repeated",
    "wrong_usage",
    "other_errors",
    "leaked_blocks",
    "left_in_flight",
    "content_errors",
    "replaced_replicas",
)


def misses(fault: Fault, row: dict[str, Any], setup: Setup) -> list[str]:
    """One line per target that `row` does not meet."""
    if "skipped" in row:
        return []
    if "failed" in row:
        return [f"{fault.name}: {row['failed']}"]
    found = [f"{name} = {row[name]}; target 0" for name in ZERO if row.get(name)]
    if row["completed"] != row["streams"]:
        found.append(f"completed = {row['completed']} of {row['streams']} streams")
    if not row["nixl_bytes"]:
        found.append("nixl_bytes = 0: nothing was handed over")
    if not row["at_strength"]:
        found.append("the application did not get back to its strength")
    limit = gap_limit_ms(fault, row, setup)
    if limit is not None and row["max_gap_ms"] > limit:
        found.append(f"max_gap_ms = {row['max_gap_ms']}; target {limit:g}")
    pause = row.get("migration_pause_ms_p99")
    if fault.gap == "migration" and setup.engine is None and pause is not None:
        limit = MIGRATION_PAUSE_MS + STEP_MS
        if pause > limit:
            found.append(f"migration_pause_ms_p99 = {pause}; target {limit:g}")
    if row.get("lowest_target", 0) < row.get("target_before", 0):
        found.append(f"lowest_target = {row['lowest_target']}; target {row['target_before']}")
    return [f"{fault.name}: {line}" for line in found]


def gap_limit_ms(fault: Fault, row: dict[str, Any], setup: Setup) -> float | None:
    """None: this fault has no target for gaps."""
    if fault.gap == "freeze":
        return setup.deadlines.silence_ms + FREEZE_GAP_MS
    if fault.gap != "kill":
        return None
    if setup.engine is None:
        return STEP_MS + KILL_GAP_MS
    predicted_ms = row.get("predicted_reprefill_ms")
    return None if predicted_ms is None else REPREFILL * float(predicted_ms)


def long_misses(rows: dict[str, Any]) -> list[str]:
    """Of benchmarks.long_answers."""
    return [f"{name}: not whole: {row.get('error', row)}" for name, row in rows.items() if not row["whole"]]
