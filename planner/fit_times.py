"""Fits measured times to kvrouter.perf_model's forms: relative least squares, nothing negative."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Fit", "fit_prefill", "fit_step"]

Coefficients = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Fit:
    coefficients: Coefficients
    spread: float  # mean relative error


def fit_prefill(points: Sequence[tuple[int, int, float]]) -> Fit:
    """a, b, c of T_prefill from (uncached, context, ms)."""
    rows = [(1.0, float(u), u * (context - 0.5 * u)) for u, context, _ in points]
    return _fit(rows, [ms for *_, ms in points])


def fit_step(points: Sequence[tuple[int, int, float]]) -> Fit:
    """d, e, f of T_step from (batch, KV tokens, ms)."""
    rows = [(1.0, float(batch), float(kv)) for batch, kv, _ in points]
    return _fit(rows, [ms for *_, ms in points])


def _fit(rows: Sequence[tuple[float, float, float]], ms: Sequence[float]) -> Fit:
    """What comes out negative is left out, the worst first, and the rest is fitted anew."""
    target = np.maximum(np.array(ms), 1e-6)
    features = np.array(rows) / target[:, None]  # relative errors: 50 ms count as much as 5 s
    scale = np.maximum(np.abs(features).max(axis=0), 1e-30)
    kept = [0, 1, 2]
    found = np.zeros(3)
    while kept:
        solved, *_ = np.linalg.lstsq(features[:, kept] / scale[kept], np.ones(len(target)), rcond=None)
        if solved.min() >= 0:
            found[kept] = solved / scale[kept]
            break
        del kept[int(solved.argmin())]
    spread = float(np.mean(np.abs(features @ found - 1)))
    return Fit((float(found[0]), float(found[1]), float(found[2])), spread)
