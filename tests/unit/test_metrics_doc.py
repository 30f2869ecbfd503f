"""docs/metrics.md names every metric there is, and none that is not."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from kvrouter.events import EventCounters
from serving.metrics import Registry
from serving.planner_host import PlannerHost
from tests.unit.app_rig import App, prompt
from tests.unit.planner_host_rig import FakeServe
from tests.unit.test_application import scrape, total

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
ROW = re.compile(r"^\| `(kvrelay_\w+)` \| (\w+) \|(.*?)\| .+ \|$", re.MULTILINE)
KIND = re.compile(r"^\| `(\w+)` \|", re.MULTILINE)


def registered(*registries: Registry) -> set[tuple[str, str, tuple[str, ...]]]:
    """(name, type, its own labels) of every metric."""
    found = set()
    parts = [part for registry in registries for part in registry._parts]
    for registry in (*registries, *parts):
        for metric in registry._metrics:
            name = metric.name + ("_total" if metric.type == "counter" else "")
            found.add((name, metric.type, getattr(metric, "_label_names", ())))
    return found


async def test_the_page_lists_what_is_registered() -> None:
    written = [
        (name, kind, tuple(re.findall(r"`(\w+)`", labels)))
        for name, kind, labels in ROW.findall(PAGE.read_text())
    ]
    async with App() as app:
        PlannerHost(control=app.control, config=app.config, connector=FakeServe())
        registries = [app.frontends[0].registry, app.control._registry]
        registries += [worker.control._registry for worker in app.workers]
        assert len(set(written)) == len(written)
        assert set(written) == registered(*registries)


def test_the_page_lists_every_kind_of_event() -> None:
    kinds = [kind for kind in KIND.findall(PAGE.read_text()) if not kind.startswith("kvrelay_")]
    assert kinds == [field.name for field in fields(EventCounters)]


async def test_the_router_shows_what_it_hears() -> None:
    """Blocks of 8 tokens: the prefill worker's own, and those the decode worker read."""
    async with App() as app:
        await app.complete(prompt(80))
        await app.is_idle()
        scraped = await scrape(app)
        assert total(scraped, "router_events_total", "kind=frames,model=tiny,variant=main") >= 2
        assert total(scraped, "router_events_total", "kind=gaps") == 0
        assert total(scraped, "router_index_blocks") >= 10
        assert total(scraped, "router_index_bytes") > 0
        assert total(scraped, "router_silent_workers") == 0
