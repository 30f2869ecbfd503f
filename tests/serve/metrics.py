"""Reads /metrics the way a scraper does."""

from __future__ import annotations

import time

from prometheus_client.parser import text_string_to_metric_families

from tests.serve.client import Client

SETTLE_S = 20.0


class Scrape:
    """Sums of samples by name and labels; every call is a scrape of its own."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def samples(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        response = self._client.get("/metrics")
        assert response.status_code == 200
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(response.text)
            for sample in family.samples
        }

    def total(self, name: str, **labels: str) -> float:
        return sum(
            value
            for (sample, own), value in self.samples().items()
            if sample == name and labels.items() <= dict(own).items()
        )

    def settled(self, name: str, expected: float, **labels: str) -> float:
        """The total once it is `expected`, or what it was when waiting any longer made no sense."""
        deadline = time.monotonic() + SETTLE_S
        while (value := self.total(name, **labels)) != expected and time.monotonic() < deadline:
            time.sleep(0.1)
        return value
