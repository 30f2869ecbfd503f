"""What a running application counted, summed over all its processes and labels."""

from __future__ import annotations

from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_S = 30


def scrape_sums(url: str) -> dict[str, float]:
    """Sample name -> sum; `url` without a trailing slash. Buckets are left out."""
    with urlopen(f"{url}/metrics", timeout=TIMEOUT_S) as response:
        text = response.read().decode()
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.endswith("_bucket"):
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums
