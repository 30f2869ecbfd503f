"""What predictors know: rates of the last hours by the minute, and of the days before by ten minutes."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["BIN_S", "DAY_BINS", "DAY_BIN_S", "DAY_S", "Errors", "Past"]

BIN_S = 60.0
DAY_S = 86_400.0
DAY_BIN_S = 600.0
DAY_BINS = int(DAY_S / DAY_BIN_S)
KEPT_BINS = 180
KEPT_DAY_BINS = 14 * DAY_BINS

Errors = dict[str, tuple[float, ...]]  # actual / forecast by predictor, the newest last


@dataclass(frozen=True, slots=True)
class Past:
    """Rates per second. `now_s` is the end of the last bin."""

    bins: tuple[float, ...] = ()  # of BIN_S, the newest last
    now_s: float = 0.0
    days: tuple[tuple[int, float], ...] = ()  # (number of the ten minutes, mean rate), oldest first
    open_day: tuple[int, float, int] | None = None  # (number, sum of rates, bins) not full yet

    def with_bin(self, rate: float, now_s: float) -> Past:
        number = int((now_s - 0.5 * BIN_S) / DAY_BIN_S)
        days, opened = self.days, self.open_day
        if opened is not None and opened[0] != number:
            days = (*days, (opened[0], opened[1] / opened[2]))[-KEPT_DAY_BINS:]
            opened = None
        total, count = (opened[1], opened[2]) if opened is not None else (0.0, 0)
        return replace(
            self,
            bins=(*self.bins[-KEPT_BINS + 1 :], rate),
            now_s=now_s,
            days=days,
            open_day=(number, total + rate, count + 1),
        )

    @property
    def last(self) -> float:
        """The rate of the last four minutes: one alone is mostly noise."""
        recent = self.bins[-4:]
        return sum(recent) / len(recent)

    def at_day(self, number: int) -> float | None:
        """Mean rate in the ten minutes `number`, if they are in the past."""
        index = number - (self.days[0][0] if self.days else 0)
        if self.days and 0 <= index < len(self.days) and self.days[index][0] == number:
            return self.days[index][1]
        for known, rate in self.days:
            if known == number:
                return rate
        return None
