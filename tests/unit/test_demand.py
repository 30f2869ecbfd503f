"""What frontends tell the planner of what they refuse unread."""

from __future__ import annotations

import asyncio

from serving.demand import Demand
from tests.scripted import Client
from tests.unit.app_rig import App
from tests.unit.handoff_fakes import until


def test_what_nobody_read_counts_like_what_came_last() -> None:
    demand = Demand()
    demand.turned_away(9.0)
    for prompt in (100, 300):
        demand.arrived(prompt, prompt // 2, "batch", 10.0)
    for _ in range(4):
        demand.turned_away(11.0)
    rows = demand.report("m", "main", [], [], 11.0).arrivals
    assert [row.age_ms for row in rows] == [1000.0] * 2 + [0.0] * 4
    assert sorted(row.prompt_tokens for row in rows[2:]) == [100, 100, 300, 300]
    assert {(row.uncached_tokens / row.prompt_tokens, row.slo_class) for row in rows} == {(0.5, "batch")}


async def test_the_planner_hears_of_requests_that_the_door_has_no_room_for() -> None:
    """A frontend at its limit is when more workers are wanted most."""
    async with App(profile={"decode_ms": 20.0}, frontend={"max_inflight": 1}) as app:
        host = app.frontends[0]
        coordinator = host.variants["tiny", "main"].coordinator
        client = Client(host.api)
        body = {"model": "tiny", "prompt": "a b c", "max_tokens": 100}
        first = asyncio.create_task(client.send("POST", "/v1/completions", body))
        await until(lambda: coordinator.in_flight == 1)
        refused = [await client.send("POST", "/v1/completions", body) for _ in range(3)]
        assert [reply.status for reply in refused] == [429] * 3
        (report,) = host._report()
        assert len(report.arrivals) == 4
        assert len({(row.prompt_tokens, row.uncached_tokens) for row in report.arrivals}) == 1
        assert (await first).status == 200
