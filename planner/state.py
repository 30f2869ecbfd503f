"""What the planner remembers between two ticks: plain frozen data, JSON as planner.observation's."""

from __future__ import annotations

from dataclasses import dataclass, field

from planner.predict import ForecastState

__all__ = ["PoolState", "State", "VariantState", "Want"]


@dataclass(frozen=True, slots=True)
class Want:
    """What the workers cost that one tick needed, with the dead band's extra demand."""

    at_s: float
    cost: float


@dataclass(frozen=True, slots=True)
class PoolState:
    """Of one Serve deployment. While `cap_until_s` lies ahead no more than `cap` replicas are asked for."""

    waiting_since_s: float | None = None  # replicas have been starting since, and none came further
    progress: tuple[int, int] = (0, 0)  # at the last tick: replicas that were ready; those and placed ones
    cap: int | None = None
    cap_until_s: float = 0.0


@dataclass(frozen=True, slots=True)
class VariantState:
    forecast: ForecastState = field(default_factory=ForecastState)
    wants: tuple[Want, ...] = ()  # of the last `down_window_s`, times `patience`
    since_s: float | None = None  # first tick since the planner last was blind or away
    last_request_s: float | None = None
    pools: dict[str, PoolState] = field(default_factory=dict)
    roles: tuple[int, int] | None = None  # asked for last, within the budget
    role_grown_s: tuple[float, float] = (-1e18, -1e18)  # when each last grew, by a flip as well
    grown_s: float = -1e18  # when they last grew in all
    shrunk_s: float = -1e18
    patience: int = 1  # times `down_window_s`; doubled by a shrink that had to be taken back


@dataclass(frozen=True, slots=True)
class State:
    variants: dict[str, VariantState] = field(default_factory=dict)
    frontends: tuple[tuple[float, int], ...] = ()  # (at, wanted) of the last `down_window_s`
