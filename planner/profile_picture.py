"""A profile as a picture: what was measured, and the fit through it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from planner.timing_profile import Profile

__all__ = ["draw_fit"]

SHARES = (
    (1.0, "nothing cached", "#2b6cb0"),
    (0.5, "half cached", "#dd6b20"),
    (0.125, "7/8 cached", "#2f855a"),
)
COLOURS = ("#2b6cb0", "#dd6b20", "#2f855a", "#718096")


def draw_fit(profile: Profile, path: Path) -> None:
    """Points are measured, lines are the fit."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogFormatter, LogLocator, NullFormatter

    figure, (prefill, step) = plt.subplots(1, 2, figsize=(12, 5))
    a, b, c = profile.times.prefill
    longest = max(context for _, context, _ in profile.prefill_points)
    contexts = np.geomspace(min(context for _, context, _ in profile.prefill_points), longest, 100)
    for share, label, colour in SHARES:
        points = [p for p in profile.prefill_points if abs(p[0] / p[1] - share) < 0.2 * share + 0.05]
        if points:
            prefill.plot([p[1] for p in points], [p[2] for p in points], "o", color=colour, alpha=0.6)
            u = contexts * share
            prefill.plot(
                contexts, a + b * u + c * u * (contexts - 0.5 * u), color=colour, linewidth=1.4, label=label
            )
    prefill.set(xscale="log", yscale="log", xlabel="prompt, tokens", ylabel="prefill, ms")
    prefill.set_xticks(sorted({context for _, context, _ in profile.prefill_points}), minor=False)
    prefill.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    for axis in (prefill.xaxis, prefill.yaxis):  # numbers, not powers of ten
        axis.set_major_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(9, 9)))
        axis.set_minor_formatter(NullFormatter())
    prefill.set_title(
        f"T_prefill, typical error {profile.times.prefill_spread:.0%}", loc="left", fontsize=10
    )

    d, e, f = profile.times.step
    by_context: dict[int, list[tuple[int, int, float]]] = {}
    for batch, kv, ms in profile.step_points:
        by_context.setdefault(round(kv / batch), []).append((batch, kv, ms))
    for number, (context, rows) in enumerate(sorted(by_context.items())):
        colour = COLOURS[number % len(COLOURS)]
        step.plot([r[0] for r in rows], [r[2] for r in rows], "o", color=colour, alpha=0.6)
        batches = np.linspace(1, max(r[0] for r in rows), 50)
        step.plot(
            batches,
            d + batches * (e + f * context),
            color=colour,
            linewidth=1.4,
            label=f"context {context}",
        )
    step.set(xlabel="batch", ylabel="decode step, ms", ylim=(0, None))
    step.set_title(f"T_step, typical error {profile.times.step_spread:.0%}", loc="left", fontsize=10)
    for axis in (prefill, step):
        axis.legend(fontsize=8)
        axis.grid(visible=True, alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    made = profile.provenance
    figure.suptitle(
        f"{made.model}, {made.engine}, {made.dtype}, {made.device}, {made.date}",
        fontsize=11,
        x=0.01,
        ha="left",
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
