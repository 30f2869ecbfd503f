"""What a simulation says: the numbers of a run, and a picture to read at a glance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from planner.settings import Targets
from planner.sim_cluster import Cluster
from planner.sim_worker import Job

__all__ = ["Criterion", "anti_phase", "draw", "summary"]

ANTI_PHASE_S = 60.0


@dataclass(frozen=True, slots=True)
class Criterion:
    """When a request attains: TTFT within `ttft_ms` plus its own uncached prefill time, mean ITL within
    `itl_ms`. Refused and unanswered requests do not."""

    ttft_ms: float
    itl_ms: float

    @classmethod
    def of(cls, targets: Targets) -> Criterion:
        return cls(targets.ttft_ms, targets.itl_ms)

    def ttft_ok(self, job: Job) -> bool:
        if job.first_token_s is None:
            return False
        ttft_ms = (job.first_token_s - job.request.arrival_s) * 1e3
        return ttft_ms <= self.ttft_ms + job.first_own_ms + 1e-3

    def itl_ok(self, job: Job) -> bool:
        if job.finished_s is None or job.first_token_s is None:
            return False
        itl_ms = mean_itl_ms(job)
        return itl_ms is None or itl_ms <= self.itl_ms


def mean_itl_ms(job: Job) -> float | None:
    """None for answers of one token."""
    if job.finished_s is None or job.first_token_s is None or job.request.output_tokens <= 1:
        return None
    return (job.finished_s - job.first_token_s) * 1e3 / (job.request.output_tokens - 1)


def summary(run: Cluster, criterion: Criterion) -> dict[str, Any]:
    """One policy's row. GPU-hours count from the order of a worker to its end."""
    jobs = run.jobs
    ttft = np.array([j.first_token_s - j.request.arrival_s for j in jobs if j.first_token_s is not None])
    itl = np.array([value for job in jobs if (value := mean_itl_ms(job)) is not None])
    ttft_ok = [criterion.ttft_ok(job) for job in jobs]
    itl_ok = [criterion.itl_ok(job) for job in jobs]
    prompts = sum(job.request.prompt_tokens for job in jobs)
    return {
        "requests": len(jobs),
        "rejected": sum(job.rejected for job in jobs),
        "p50_ttft_s": _percentile(ttft, 50),
        "p90_ttft_s": _percentile(ttft, 90),
        "p99_ttft_s": _percentile(ttft, 99),
        "p99_itl_ms": _percentile(itl, 99),
        "attainment": _share([a and b for a, b in zip(ttft_ok, itl_ok, strict=True)]),
        "ttft_attainment": _share(ttft_ok),
        "itl_attainment": _share(itl_ok),
        "gpu_hours": round(run.gpu_s / 3600, 3),
        "scale_events": run.scale_events,
        "hit": round(sum(job.cached_tokens or 0 for job in jobs) / max(prompts, 1), 4),
        "failures": run.failures,
        "resumed": sum(job.resumed for job in jobs),
        "anti_phase": anti_phase(run),
    }


def _percentile(values: np.ndarray, q: float) -> float | None:
    return round(float(np.percentile(values, q)), 4) if len(values) else None


def _share(met: Sequence[bool]) -> float | None:
    return round(sum(met) / len(met), 5) if met else None


def anti_phase(run: Cluster) -> int:
    """How often one role was told to shrink within a minute after the other one was told to grow.

    A flip, both at once, is none.
    """
    found = 0
    grown = [-2 * ANTI_PHASE_S, -2 * ANTI_PHASE_S]
    before: tuple[int, int] | None = None
    for sample in run.samples:
        if before is not None:
            for role in (0, 1):
                if sample.targets[role] < before[role]:
                    found += sample.at_s - grown[1 - role] < ANTI_PHASE_S
            for role in (0, 1):
                if sample.targets[role] > before[role]:
                    grown[role] = sample.at_s
        before = sample.targets
    return found


# ------------------------------------------------------------ picture


def draw(run: Cluster, criterion: Criterion, title: str, path: Path, row: Mapping[str, Any]) -> None:
    """Load, replicas, TTFT and ITL against their targets, and cost, over the time of the run."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    end_s = max(run.end_s, 1.0)
    bin_s = max(end_s / 120, 5.0)
    unit_s, unit = (3600.0, "hours") if end_s > 3 * 3600 else (60.0, "minutes")
    edges = np.arange(0.0, end_s + bin_s, bin_s)
    centres = (edges[:-1] + 0.5 * bin_s) / unit_s
    blue, orange, red, grey, green = "#2b6cb0", "#dd6b20", "#c53030", "#718096", "#2f855a"
    figure, axes = plt.subplots(
        5, 1, figsize=(11, 12), sharex=True, gridspec_kw={"height_ratios": [2, 2.4, 2, 2, 1.6]}
    )
    load, workers, ttft, itl, cost = axes

    counts, _ = np.histogram([job.request.arrival_s for job in run.jobs], edges)
    load.fill_between(centres, counts / bin_s, step="mid", color=grey, alpha=0.35)
    load.plot(centres, counts / bin_s, color=grey, drawstyle="steps-mid", linewidth=1)
    load.set_ylabel("requests/s")
    load.set_title(f"{title}\n{_headline(row)}\n", loc="left", fontsize=11)

    at = np.array([sample.at_s for sample in run.samples]) / unit_s
    for role, (name, colour) in enumerate((("prefill", blue), ("decode", orange))):
        ready = [sample.ready[role] for sample in run.samples]
        target = [sample.targets[role] for sample in run.samples]
        workers.step(at, ready, where="post", color=colour, linewidth=1.8, label=f"{name}, ready")
        workers.step(
            at, target, where="post", color=colour, linewidth=1, linestyle=":", label=f"{name}, target"
        )
    workers.set_ylabel("workers by role")
    workers.yaxis.get_major_locator().set_params(integer=True)
    cost.yaxis.get_major_locator().set_params(integer=True)
    workers.legend(loc="lower right", ncols=2, fontsize=8, framealpha=0.9)

    jobs = [job for job in run.jobs if job.first_token_s is not None]
    arrivals = np.array([job.request.arrival_s for job in jobs])
    waits = np.array(
        [(job.first_token_s or 0.0) - job.request.arrival_s - job.first_own_ms / 1e3 for job in jobs]
    )
    _band(ttft, centres, edges, at=arrivals, values=waits, colour=blue)
    ttft.axhline(criterion.ttft_ms / 1e3, color=red, linestyle="--", linewidth=1.2, label="target")
    ttft.set_ylabel("TTFT minus\nown prefill, s")
    _limit(ttft, waits, criterion.ttft_ms / 1e3)
    ttft.legend(loc="upper right", ncols=3, fontsize=8, framealpha=0.9)

    pairs = [(job.request.arrival_s, v) for job in jobs if (v := mean_itl_ms(job)) is not None]
    times = np.array([pair[0] for pair in pairs])
    gaps = np.array([pair[1] for pair in pairs])
    _band(itl, centres, edges, at=times, values=gaps, colour=orange)
    itl.axhline(criterion.itl_ms, color=red, linestyle="--", linewidth=1.2, label="target")
    itl.set_ylabel("mean ITL\nof a request, ms")
    _limit(itl, gaps, criterion.itl_ms)
    itl.legend(loc="upper right", ncols=3, fontsize=8, framealpha=0.9)

    grid = np.arange(0.0, end_s, bin_s / 4)
    held = np.zeros(len(grid))
    for worker in run.workers.values():
        gone = end_s if worker.gone_s is None else worker.gone_s
        held += (grid >= worker.ordered_s) & (grid < gone)
    cost.fill_between(grid / unit_s, held, step="post", color=green, alpha=0.3)
    cost.step(grid / unit_s, held, where="post", color=green, linewidth=1.2)
    cost.set_ylabel("GPUs held")
    cost.set_xlabel(unit)
    for axis in axes:
        axis.set_ylim(bottom=0)
        axis.grid(visible=True, alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_xlim(0, end_s / unit_s)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _headline(row: Mapping[str, Any]) -> str:
    def shown(key: str, form: str) -> str:
        value = row.get(key)
        return "-" if value is None else format(value, form)

    return (
        f"SLO attainment {shown('attainment', '.2%')}   TTFT p90 {shown('p90_ttft_s', '.2f')} s,"
        f" p99 {shown('p99_ttft_s', '.2f')} s   ITL p99 {shown('p99_itl_ms', '.1f')} ms  "
        f" {shown('gpu_hours', '.2f')} GPU-hours   {row.get('scale_events')} scale events"
    )


def _band(
    axis: Any, centres: np.ndarray, edges: np.ndarray, *, at: np.ndarray, values: np.ndarray, colour: str
) -> None:
    """Median and 95th percentile in each bin."""
    where = np.digitize(at, edges) - 1
    middle, high = np.full(len(centres), np.nan), np.full(len(centres), np.nan)
    for number in np.unique(where):
        if 0 <= number < len(centres):
            middle[number], high[number] = np.percentile(values[where == number], (50, 95))
    axis.fill_between(centres, middle, high, color=colour, alpha=0.2)
    axis.plot(centres, high, color=colour, linewidth=1.6, label="95 % of requests")
    axis.plot(centres, middle, color=colour, linewidth=0.9, alpha=0.8, label="median")


def _limit(axis: Any, values: np.ndarray, target: float) -> None:
    """So that the target stays readable when a few requests are far off."""
    if len(values):
        top = float(np.percentile(values, 99.5))
        axis.set_ylim(0, max(1.3 * target, min(top * 1.1, 6 * target)))
