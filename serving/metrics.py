"""Counters, gauges and histograms cheap enough for the token path, and the Prometheus text of them.

A metric lives on one thread (the event loop), so it takes no locks: `inc` and `observe` cost well under a
microsecond. Each process makes a snapshot (`Registry.families`); Control merges the snapshots of all
processes, and whichever frontend is scraped renders the merged ones with prometheus-client.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric

from serving.wire import Family, Sample

PREFIX = "kvrelay_"

# Seconds. TTFT and end-to-end reach minutes, ITL and steps start below a millisecond.
LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.5, 0.8, 1.5, 3, 6, 12, 30, 60, 120, 300
)  # fmt: skip
TOKEN_BUCKETS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)

Labels = tuple[str, ...]


class Counter:
    """A monotone number per label values."""

    type = "counter"

    def __init__(self, name: str, help: str, label_names: Sequence[str] = ()) -> None:
        self.name = PREFIX + name
        self.help = help
        self._label_names = tuple(label_names)
        self._values: dict[Labels, float] = {} if label_names else {(): 0.0}  # shown before the first

    def inc(self, amount: float = 1.0, labels: Labels = ()) -> None:
        self._values[labels] = self._values.get(labels, 0.0) + amount

    def set_total(self, total: float, labels: Labels = ()) -> None:
        """For totals that something else already counts; must never go down."""
        self._values[labels] = total

    def value(self, labels: Labels = ()) -> float:
        return self._values.get(labels, 0.0)

    def samples(self, common: dict[str, str]) -> Iterable[Sample]:
        for labels, value in self._values.items():
            yield Sample("_total", common | dict(zip(self._label_names, labels, strict=True)), value)


class Gauge:
    """A number that is read when a snapshot is made."""

    type = "gauge"

    def __init__(
        self, name: str, help: str, read: Callable[[], dict[Labels, float]], label_names: Sequence[str] = ()
    ) -> None:
        self.name = PREFIX + name
        self.help = help
        self._read = read
        self._label_names = tuple(label_names)

    def samples(self, common: dict[str, str]) -> Iterable[Sample]:
        for labels, value in self._read().items():
            yield Sample("", common | dict(zip(self._label_names, labels, strict=True)), value)


class Histogram:
    """Counts per bucket; `observe` in the unit that the name says."""

    type = "histogram"

    def __init__(self, name: str, help: str, buckets: Sequence[float] = LATENCY_BUCKETS) -> None:
        self.name = PREFIX + name
        self.help = help
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    @property
    def count(self) -> int:
        return sum(self._counts)

    def samples(self, common: dict[str, str]) -> Iterable[Sample]:
        total = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            le = "+Inf" if bound == float("inf") else repr(float(bound))
            yield Sample("_bucket", {**common, "le": le}, total)
        yield Sample("_sum", common, self._sum)
        yield Sample("_count", common, total)


M = TypeVar("M", Counter, Gauge, Histogram)


class Registry:
    """All metrics of one process; `labels` stand on every sample (who the process is)."""

    def __init__(self, labels: dict[str, str]) -> None:
        self.labels = labels
        self._metrics: list[Counter | Gauge | Histogram] = []
        self._before: list[Callable[[], None]] = []
        self._parts: list[Registry] = []

    def part(self, labels: dict[str, str]) -> Registry:
        """Of one part of the process; its samples have `labels` besides, and are in our snapshots."""
        part = Registry({**self.labels, **labels})
        self._parts.append(part)
        return part

    def counter(self, name: str, help: str, label_names: Sequence[str] = ()) -> Counter:
        return self._add(Counter(name, help, label_names))

    def gauge(
        self, name: str, help: str, read: Callable[[], dict[Labels, float]], label_names: Sequence[str] = ()
    ) -> Gauge:
        return self._add(Gauge(name, help, read, label_names))

    def histogram(self, name: str, help: str, buckets: Sequence[float] = LATENCY_BUCKETS) -> Histogram:
        return self._add(Histogram(name, help, buckets))

    def _add(self, metric: M) -> M:
        self._metrics.append(metric)
        return metric

    def before_snapshot(self, copy: Callable[[], None]) -> None:
        """Call `copy` first in every snapshot: for totals that something else counts."""
        self._before.append(copy)

    def families(self) -> list[Family]:
        """A snapshot."""
        for copy in self._before:
            copy()
        families = [
            Family(metric.name, metric.type, metric.help, list(metric.samples(self.labels)))
            for metric in self._metrics
        ]
        return merge([families, *(part.families() for part in self._parts)]) if self._parts else families


def merge(snapshots: Iterable[list[Family]]) -> list[Family]:
    """One family a name, the samples of all snapshots; label values tell the processes apart."""
    merged: dict[str, Family] = {}
    for families in snapshots:
        for family in families:
            known = merged.get(family.name)
            if known is None:
                merged[family.name] = Family(family.name, family.type, family.help, list(family.samples))
            else:
                known.samples.extend(family.samples)
    return list(merged.values())


def fold(into: list[Family], families: list[Family], label: str, value: str) -> list[Family]:
    """Add the counters and histograms of `families`, with `label` set to `value`, to those of `into`.

    How a departed process's counts stay in every sum; its gauges go with it.
    """
    folded: dict[str, Family] = {}
    for family in merge([into, families]):
        if family.type == "gauge":
            continue
        sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for sample in family.samples:
            labels = dict(sample.labels)
            if label in labels:
                labels[label] = value
            key = (sample.suffix, tuple(sorted(labels.items())))
            sums[key] = sums.get(key, 0.0) + sample.value
        samples = [Sample(suffix, dict(labels), total) for (suffix, labels), total in sums.items()]
        folded[family.name] = Family(family.name, family.type, family.help, samples)
    return list(folded.values())


class _Fixed:
    """A prometheus-client collector over families that are already there."""

    def __init__(self, families: list[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        for family in self._families:
            try:
                metric = Metric(family.name, family.help, family.type)
            except ValueError:  # no metric at all: one party's nonsense must not hide the others'
                continue
            for sample in family.samples:
                metric.add_sample(family.name + sample.suffix, sample.labels, sample.value)
            yield metric


def render(families: list[Family]) -> bytes:
    """The Prometheus text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Fixed(families))
    return generate_latest(registry)
