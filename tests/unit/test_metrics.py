"""Metrics: cheap counters, snapshots, merging, and the text a scraper reads."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from serving.metrics import Registry, fold, merge, render
from serving.wire import Family


def samples(families: list[Family]) -> dict[tuple[str, str], float]:
    """(sample name, its `worker` and `le` labels) -> value, as a scraper parses it."""
    text = render(families).decode()
    return {
        (s.name, s.labels.get("worker", "") + s.labels.get("le", "")): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def worker(name: str, tokens: int) -> Registry:
    registry = Registry({"worker": name})
    registry.counter("tokens", "Tokens").inc(tokens)
    histogram = registry.histogram("step_seconds", "Steps", buckets=(0.1, 1.0))
    histogram.observe(0.05, times=3)
    histogram.observe(5.0)
    registry.gauge("leases", "Leases", lambda: {(): 2.0})
    return registry


def test_a_scraper_reads_what_was_counted():
    read = samples(worker("a", 7).families())
    assert read["kvrelay_tokens_total", "a"] == 7
    assert read["kvrelay_step_seconds_bucket", "a0.1"] == 3
    assert read["kvrelay_step_seconds_bucket", "a1.0"] == 3
    assert read["kvrelay_step_seconds_bucket", "a+Inf"] == 4
    assert read["kvrelay_step_seconds_count", "a"] == 4
    assert read["kvrelay_step_seconds_sum", "a"] == 5.15
    assert read["kvrelay_leases", "a"] == 2


def test_merged_snapshots_keep_their_labels():
    read = samples(merge([worker("a", 1).families(), worker("b", 2).families()]))
    assert read["kvrelay_tokens_total", "a"] == 1
    assert read["kvrelay_tokens_total", "b"] == 2


def test_departed_processes_stay_in_every_sum_but_not_in_gauges():
    departed = fold([], worker("a", 1).families(), "worker", "departed")
    departed = fold(departed, worker("b", 2).families(), "worker", "departed")
    read = samples(departed)
    assert read["kvrelay_tokens_total", "departed"] == 3
    assert read["kvrelay_step_seconds_count", "departed"] == 8
    assert ("kvrelay_leases", "departed") not in read


def test_totals_counted_elsewhere_are_copied_before_the_snapshot_that_shows_them():
    registry = Registry({})
    total = registry.counter("bytes", "Bytes")
    registry.before_snapshot(lambda: total.set_total(42))
    assert samples(registry.families())["kvrelay_bytes_total", ""] == 42
