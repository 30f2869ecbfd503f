"""What a simulation says: the numbers of a run, and a picture to read at a glance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from planner.settings import Targets
from planner.sim_cluster import Cluster
from planner.sim_setup import Sample
from planner.sim_worker import Job

__all__ = ["Criterion", "anti_phase", "draw", "summary"]

ANTI_PHASE_S = 60.0
MOST_OF_TARGET = 6  # that a panel shows; what is above is marked
BLUE, ORANGE, RED, GREY, GREEN = "#2b6cb0", "#dd6b20", "#c53030", "#718096", "#2f855a"


@dataclass(frozen=True, slots=True)
class Criterion:
    """When a request attains: TTFT within the target for its length, mean ITL within its target. Refused
    and unanswered requests do not.

    `own_prefill`: what its length adds to the TTFT target is its own uncached prefill time instead.
    """

    targets: Targets
    own_prefill: bool = False

    def __str__(self) -> str:
        return f"TTFT within {self.ttft_target}; mean ITL within {self.targets.itl_ms:g} ms"

    @property
    def ttft_target(self) -> str:
        """In words."""
        per_1k = self.targets.ttft_ms_per_1k_tokens
        more = "own uncached prefill" if self.own_prefill else f"{per_1k:.4g} ms per 1,000 prompt tokens"
        return f"{self.targets.ttft_ms:g} ms" + (f" + {more}" if self.own_prefill or per_1k else "")

    def ttft_of_target(self, job: Job) -> float | None:
        """1: just in time; None: without a first token."""
        if job.first_token_s is None:
            return None
        by_length_ms = self.targets.ttft_for(job.request.prompt_tokens)
        target_ms = self.targets.ttft_ms + job.first_own_ms if self.own_prefill else by_length_ms
        return (job.first_token_s - job.request.arrival_s) * 1e3 / target_ms

    def ttft_ok(self, job: Job) -> bool:
        of_target = self.ttft_of_target(job)
        return of_target is not None and of_target <= 1 + 1e-6

    def itl_ok(self, job: Job) -> bool:
        if job.finished_s is None or job.first_token_s is None:
            return False
        itl_ms = mean_itl_ms(job)
        return itl_ms is None or itl_ms <= self.targets.itl_ms


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
    ok = [a and b for a, b in zip(ttft_ok, itl_ok, strict=True)]
    prompts = sum(job.request.prompt_tokens for job in jobs)
    return {
        "requests": len(jobs),
        "rejected": sum(job.rejected for job in jobs),
        "rejected_for": dict(sorted(Counter(job.refused_for for job in jobs if job.refused_for).items())),
        "p50_ttft_s": _percentile(ttft, 50),
        "p90_ttft_s": _percentile(ttft, 90),
        "p99_ttft_s": _percentile(ttft, 99),
        "p99_itl_ms": _percentile(itl, 99),
        "criterion": str(criterion),
        "attainment": _share(ok),
        "attainment_of_admitted": _share(
            [met for met, job in zip(ok, jobs, strict=True) if not job.rejected]
        ),
        "ttft_attainment": _share(ttft_ok),
        "itl_attainment": _share(itl_ok),
        "gpu_hours": round(run.gpu_s / 3600, 3),
        "scale_events": run.scale_events,
        "hit": round(sum(job.cached_tokens or 0 for job in jobs) / max(prompts, 1), 4),
        "failures": run.failures,
        "resumed": sum(job.resumed for job in jobs),
        "moved": sum(job.moved for job in jobs),
        "anti_phase": anti_phase(run),
    }


def _percentile(values: np.ndarray, q: float) -> float | None:
    return round(float(np.percentile(values, q)), 4) if len(values) else None


def _share(met: Sequence[bool]) -> float | None:
    return round(sum(met) / len(met), 5) if met else None


def anti_phase(run: Cluster) -> int:
    """How often one role was told to shrink within a minute after the other one was told to grow, or at the
    same time."""
    found = 0
    grown = [-2 * ANTI_PHASE_S, -2 * ANTI_PHASE_S]
    before: tuple[int, int] | None = None
    for sample in run.samples:
        if before is not None:
            for role in (0, 1):
                if sample.targets[role] > before[role]:
                    grown[role] = sample.at_s
            for role in (0, 1):
                if sample.targets[role] < before[role]:
                    found += sample.at_s - grown[1 - role] < ANTI_PHASE_S
        before = sample.targets
    return found


# ------------------------------------------------------------ picture


def draw(
    run: Cluster,
    criterion: Criterion,
    title: str,
    path: Path,
    row: Mapping[str, Any],
    *,
    budget: float | None = None,
) -> None:
    """Load, replicas, TTFT and ITL against their targets, and cost, over the time of the run."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    end_s = max(run.end_s, 1.0)
    bin_s = max(end_s / 120, 5.0)
    unit_s, unit = (3600.0, "hours") if end_s > 3 * 3600 else (60.0, "minutes")
    edges = np.arange(0.0, end_s + bin_s, bin_s)
    time = _Time(edges, (edges[:-1] + 0.5 * bin_s) / unit_s, unit_s)
    figure, axes = plt.subplots(
        5, 1, figsize=(11, 13), sharex=True, gridspec_kw={"height_ratios": [2, 2.4, 2, 2, 1.6]}
    )
    load, workers, ttft, itl, cost = axes
    load.set_title(f"{title}\n{_headline(row)}\n", loc="left", fontsize=11)
    _draw_load(load, run.jobs, time)
    _draw_workers(workers, run.samples, unit_s)

    jobs = [(job, x) for job in run.jobs if (x := criterion.ttft_of_target(job)) is not None]
    arrivals = np.array([job.request.arrival_s for job, _ in jobs])
    ratios = np.array([x for _, x in jobs])
    _draw_times(ttft, time, arrivals, ratios, shown=_Shown(1.0, criterion.ttft_target, BLUE, "x"))
    ttft.set_ylabel("TTFT, times\nits own target")
    pairs = [(job.request.arrival_s, v) for job in run.jobs if (v := mean_itl_ms(job)) is not None]
    arrivals, gaps = np.array([at_s for at_s, _ in pairs]), np.array([ms for _, ms in pairs])
    itl_ms = criterion.targets.itl_ms
    _draw_times(itl, time, arrivals, gaps, shown=_Shown(itl_ms, f"{itl_ms:g} ms", ORANGE, " ms"))
    itl.set_ylabel("mean ITL\nof a request, ms")
    _draw_cost(cost, run, np.arange(0.0, end_s, bin_s / 4), unit_s, budget)
    cost.set_xlabel(unit)
    for axis in axes:
        axis.set_ylim(bottom=0)
        axis.grid(visible=True, alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(  # above, where nothing is drawn
            loc="lower right", bbox_to_anchor=(1.0, 0.98), ncols=5, fontsize=8, frameon=False
        )
    axes[0].set_xlim(0, end_s / unit_s)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


@dataclass(frozen=True, slots=True)
class _Time:
    edges: np.ndarray  # of bins, seconds
    centres: np.ndarray  # in the unit that is drawn
    unit_s: float


@dataclass(frozen=True, slots=True)
class _Shown:
    """What is drawn against its target."""

    target: float
    words: str  # for the target
    colour: str
    unit: str


def _draw_load(axis: Any, jobs: Sequence[Job], time: _Time) -> None:
    bin_s = time.edges[1] - time.edges[0]
    counts, _ = np.histogram([job.request.arrival_s for job in jobs], time.edges)
    axis.fill_between(time.centres, counts / bin_s, step="mid", color=GREY, alpha=0.35)
    axis.plot(time.centres, counts / bin_s, color=GREY, drawstyle="steps-mid", linewidth=1, label="arrived")
    rejected, _ = np.histogram([job.request.arrival_s for job in jobs if job.rejected], time.edges)
    if rejected.any():
        axis.fill_between(
            time.centres, rejected / bin_s, step="mid", color=RED, alpha=0.5, label="of these rejected"
        )
    axis.set_ylabel("requests/s")


def _draw_workers(axis: Any, samples: Sequence[Sample], unit_s: float) -> None:
    at = np.array([sample.at_s for sample in samples]) / unit_s
    for role, (name, colour) in enumerate((("prefill", BLUE), ("decode", ORANGE))):
        ready = [sample.ready[role] for sample in samples]
        target = [sample.targets[role] for sample in samples]
        axis.step(at, ready, where="post", color=colour, linewidth=1.8, label=f"{name}, ready")
        axis.step(
            at, target, where="post", color=colour, linewidth=1, linestyle=":", label=f"{name}, target"
        )
    axis.set_ylabel("workers by role")
    axis.yaxis.get_major_locator().set_params(integer=True)


def _draw_times(axis: Any, time: _Time, at: np.ndarray, values: np.ndarray, *, shown: _Shown) -> None:
    """Median and 95th percentile in each bin, and the target. What is far above it is marked at the top."""
    where = np.digitize(at, time.edges) - 1
    middle, high = np.full(len(time.centres), np.nan), np.full(len(time.centres), np.nan)
    for number in np.unique(where):
        if 0 <= number < len(time.centres):
            middle[number], high[number] = np.percentile(values[where == number], (50, 95))
    axis.fill_between(time.centres, middle, high, color=shown.colour, alpha=0.2)
    axis.plot(time.centres, high, color=shown.colour, linewidth=1.6, label="95 % of requests")
    axis.plot(time.centres, middle, color=shown.colour, linewidth=0.9, alpha=0.8, label="median")
    axis.axhline(shown.target, color=RED, linestyle="--", linewidth=1.2, label=f"target: {shown.words}")
    if not len(values):
        return
    top = max(
        1.3 * shown.target, min(1.1 * float(np.percentile(values, 99.5)), MOST_OF_TARGET * shown.target)
    )
    axis.set_ylim(0, top)
    beyond = high > top
    if beyond.any():
        axis.scatter(
            time.centres[beyond],
            np.full(beyond.sum(), top),
            marker="^",
            s=26,
            color=RED,
            clip_on=False,
            zorder=5,
            label=f"above: up to {np.nanmax(high):,.0f}{shown.unit}",
        )


def _draw_cost(axis: Any, run: Cluster, grid: np.ndarray, unit_s: float, budget: float | None) -> None:
    held = np.zeros(len(grid))
    for worker in run.workers.values():
        gone = run.end_s if worker.gone_s is None else worker.gone_s
        held += (grid >= worker.ordered_s) & (grid < gone)
    axis.fill_between(grid / unit_s, held, step="post", color=GREEN, alpha=0.3)
    axis.step(grid / unit_s, held, where="post", color=GREEN, linewidth=1.2, label="ordered or there")
    room = run.setup.capacity
    for limit, name, line in ((budget, "budget", "--"), (room, "room in the cluster", ":")):
        if limit is not None:
            inside = limit <= 3 * held.max(initial=1.0)  # else it would press all else to the ground
            shown = f"{name}: {limit:g}" + ("" if inside else ", far above")
            axis.plot([], [], color=RED, linestyle=line, linewidth=1.2, label=shown)
            if inside:
                axis.axhline(limit, color=RED, linestyle=line, linewidth=1.2)
    axis.set_ylabel("GPUs held")
    axis.yaxis.get_major_locator().set_params(integer=True)


def _headline(row: Mapping[str, Any]) -> str:
    def shown(key: str, form: str) -> str:
        value = row.get(key)
        return "-" if value is None else format(value, form)

    rejected, requests = row["rejected"], max(row["requests"], 1)
    refused = f" ({rejected / requests:.2%} rejected)" if rejected else ""
    return (
        f"SLO attainment {shown('attainment', '.2%')}{refused}   TTFT p90 {shown('p90_ttft_s', '.2f')} s,"
        f" p99 {shown('p99_ttft_s', '.2f')} s   ITL p99 {shown('p99_itl_ms', '.1f')} ms  "
        f" {shown('gpu_hours', '.2f')} GPU-hours   {row.get('scale_events')} scale events"
    )
