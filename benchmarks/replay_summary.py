"""What a replay says of a policy: the numbers of its row, and the table of all rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.replay_workers import Job

SLO_S = 2.0


def summary(jobs: Sequence[Job]) -> dict[str, float]:
    """The keys of one policy's row."""
    ttft = np.array([job.first_token_s - job.request.arrival_s for job in jobs])
    tpot = [
        (job.finished_s - job.first_token_s) / (job.request.output_tokens - 1)
        for job in jobs
        if job.request.output_tokens > 1
    ]
    blocks = sum(len(job.request.hashes) for job in jobs)
    p50, p90, p99 = np.percentile(ttft, (50, 90, 99))
    return {
        "hit": round(sum(job.cached_blocks or 0 for job in jobs) / max(blocks, 1), 4),
        "mean_ttft_s": round(float(ttft.mean()), 4),
        "p50_ttft_s": round(float(p50), 4),
        "p90_ttft_s": round(float(p90), 4),
        "p99_ttft_s": round(float(p99), 4),
        "slo": round(float((ttft <= SLO_S).mean()), 4),
        "mean_tpot_ms": round(float(np.mean(tpot)) * 1e3, 3) if tpot else 0.0,
    }


def print_table(title: str, results: dict[str, dict[str, float]]) -> None:
    table = Table(title=title)
    table.add_column("policy")
    for head in ("hit", "mean s", "p50 s", "p90 s", "p99 s", "slo", "TPOT ms"):
        table.add_column(head, justify="right")
    for policy, row in results.items():
        table.add_row(policy, *(f"{value:.3f}" for value in row.values()))
    Console().print(table)
