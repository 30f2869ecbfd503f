"""planner.trend: stretches of one rate each; clumps, holes and accidents."""

from __future__ import annotations

import random

import pytest

from planner.trend import detrended


def _poisson(*pieces: tuple[float, float, float]) -> list[float]:
    """(rate, from, to) each."""
    generator = random.Random(1)
    times = []
    for rate, at_s, end_s in pieces:
        while (at_s := at_s + generator.expovariate(rate)) < end_s:
            times.append(at_s)
    return times


def _paces(
    times: list[float], spans: list[tuple[float, float]], *windows: tuple[float, float]
) -> list[float]:
    """Arrivals per unit of detrended time in each window of the real one: 1 where all trend is gone."""
    units = detrended(times, spans)
    assert len(units) == len(times)
    assert units == sorted(units)
    paces = []
    for from_s, to_s in windows:
        inside = [unit for unit, at_s in zip(units, times, strict=True) if from_s <= at_s < to_s]
        paces.append((len(inside) - 1) / (inside[-1] - inside[0]))
    return paces


@pytest.mark.parametrize(
    ("pieces", "windows"),
    [
        pytest.param([(4, 0, 300)], [(0, 100), (200, 300)], id="flat"),
        pytest.param([(1, 0, 295), (30, 295, 300)], [(0, 295), (295, 300)], id="step, 5 s ago"),
        pytest.param([(0.2, 0, 240), (30, 240, 300)], [(0, 240), (240, 300)], id="step from almost none"),
        pytest.param([(5, 0, 200), (10, 200, 300)], [(0, 200), (200, 300)], id="twice as many"),
        pytest.param([(20, 0, 240), (1, 240, 300)], [(0, 240), (240, 300)], id="fall"),
        pytest.param(
            [(2, 0, 100), (16, 100, 160), (2, 160, 300)], [(0, 100), (100, 160), (160, 300)], id="burst"
        ),
        pytest.param([(20, 0, 8), (1, 8, 300)], [(0, 8), (8, 300)], id="end of one that leaves the window"),
    ],
)
def test_each_stretch_is_at_its_own_mean_rate(
    pieces: list[tuple[float, float, float]], windows: list[tuple[float, float]]
) -> None:
    for pace in _paces(_poisson(*pieces), [(0.0, 300.0)], *windows):
        assert pace == pytest.approx(1.0, rel=0.25)


def test_clumps_stay() -> None:
    """Sixty requests within 3 s, every minute: no trend, and so as dense beside the others as they came."""
    clumps = [60.0 * k + 20 + i / 20 for k in range(5) for i in range(60)]
    times = sorted(clumps + _poisson((1, 0, 300)))
    (clump,) = _paces(times, [(0.0, 300.0)], (140, 143))
    assert clump == pytest.approx(20 / (len(times) / 300), rel=0.2)


def test_a_hole_is_no_time_without_arrivals() -> None:
    times = _poisson((10, 0, 40), (10, 280, 300))
    for pace in _paces(times, [(0.0, 40.0), (280.0, 300.0)], (0, 40), (280, 300)):
        assert pace == pytest.approx(1.0, rel=0.15)


@pytest.mark.parametrize(
    ("times", "spans", "units"),
    [
        pytest.param([], [], [], id="none"),
        pytest.param([5.0], [(0.0, 10.0)], [0.5], id="one"),
        pytest.param([5.0, 5.0], [(5.0, 5.0)], [0.0, 0.0], id="all at once"),
        pytest.param([4.0, 12.0], [(5.0, 8.0), (10.0, 14.0)], [0.0, 1.5], id="somewhat before its span"),
    ],
)
def test_small_cases(times: list[float], spans: list[tuple[float, float]], units: list[float]) -> None:
    assert detrended(times, spans) == units
