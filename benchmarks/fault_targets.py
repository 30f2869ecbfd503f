"""What a fault may cost, and the line that says so when it cost more."""

from __future__ import annotations

from math import ceil
from typing import Any

from benchmarks.fault_app import PREFILL_MS_PER_TOKEN, STEP_MS, Setup
from benchmarks.fault_scenarios import LONG_PROMPTS, Fault

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
        return [f"{fault.name}: skipped: {row['skipped']}"]
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
    found += [f"{name} = {row.get(name)}; target 1 or more" for name in fault.demands if not row.get(name)]
    if fault.gap == "migration" and row.get("resumes"):  # they move with their KV, all of them
        found.append(f"resumes = {row['resumes']}; target 0")
    leaving = row.get("leaving_streams", 0)
    if row.get("migrations_moved", 0) < leaving:
        found.append(f"migrations_moved = {row['migrations_moved']}; {leaving} streams had to leave")
    pause = row.get("migration_pause_ms_p99")
    if fault.gap == "migration" and setup.engine is None and pause is not None:
        limit = MIGRATION_PAUSE_MS + STEP_MS
        if pause > limit:
            found.append(f"migration_pause_ms_p99 = {pause}; target {limit:g}")
    if fault.late:
        found += _late_misses(fault, row, setup)
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


def _late_misses(fault: Fault, row: dict[str, Any], setup: Setup) -> list[str]:
    waited_ms, limit = row.get("late_wait_ms"), late_limit_ms(fault, row, setup)
    if waited_ms is None:
        return ["late_wait_ms is not known: it struck no prompt"]
    if limit is None:
        return ["late_wait_ms has no target: how long its prompts take was not measured"]
    return [f"late_wait_ms = {waited_ms}; target {limit:g}"] if waited_ms > limit else []


def late_limit_ms(fault: Fault, row: dict[str, Any], setup: Setup) -> float | None:
    """From the fault on: until it is noticed, then all long prompts anew on the workers that are left, one
    after another, and the KV of all of them over one way; and what a killed worker may cost any stream."""
    survivors = setup.prefill - 1
    if setup.engine is not None:
        predicted_ms = row.get("predicted_late_ms")  # with all workers
        if predicted_ms is None:
            return None
        anew_ms = REPREFILL * float(predicted_ms) * setup.prefill / survivors
    else:
        prompts = ceil(LONG_PROMPTS / survivors)
        kv_bytes = LONG_PROMPTS * setup.long_prompt_tokens * setup.kv_bytes_per_token
        anew_ms = prompts * setup.long_prompt_tokens * PREFILL_MS_PER_TOKEN
        anew_ms += kv_bytes / setup.network_bytes_per_s * 1e3 + STEP_MS
    noticed_ms = setup.deadlines.silence_ms if fault.late == "freeze" else 0.0
    return round(noticed_ms + anew_ms + KILL_GAP_MS, 1)


def long_misses(rows: dict[str, Any]) -> list[str]:
    """Of benchmarks.long_answers."""
    return [f"{name}: not whole: {row.get('error', row)}" for name, row in rows.items() if not row["whole"]]
