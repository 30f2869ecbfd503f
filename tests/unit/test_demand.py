"""What frontends tell the planner: each request once, by its age, and those that they refuse unread."""

from __future__ import annotations

import asyncio
from array import array

import pytest

from serving.demand import MOST_ROWS, Demand
from serving.engine.base import SamplingParams
from serving.generation import CollectedText, GenerationRequest
from serving.run import Run, Stage
from tests.scripted import Client
from tests.unit.app_rig import App
from tests.unit.handoff_fakes import until


def test_demand_is_told_once_and_by_age() -> None:
    demand = Demand()
    demand.arrived(100, 60, None, 10.0)
    demand.arrived(200, 200, "batch", 10.5)
    demand.finished(100, 7)
    report = demand.report("m", "main", [], [], 11.0)
    assert [(row.age_ms, row.prompt_tokens, row.uncached_tokens) for row in report.arrivals] == [
        (1000.0, 100, 60),
        (500.0, 200, 200),
    ]
    assert report.outputs == [(100, 7)]
    again = demand.report("m", "main", [], [], 12.0)
    assert (again.arrivals, again.outputs, again.fitted) == ([], [], None)


def test_answers_that_go_on_are_told_with_what_they_have() -> None:
    def run(prompt: int, sent: int, stage: Stage) -> Run:
        request = GenerationRequest(
            "r", "m", array("I", range(prompt)), SamplingParams(max_tokens=9, seed=1)
        )
        made = Run(request, CollectedText(), 1.0, lambda run, outcome: None)
        made.sent.extend(range(sent))
        made.enter(stage, 2.0)
        return made

    live = [run(5, 0, Stage.PREFILL), run(7, 1, Stage.TRANSFER), run(11, 4, Stage.DECODE)]
    report = Demand().report("m", "main", live, [], 3.0)
    assert (report.queued, report.queue_age_ms, report.decoding) == (1, 2000.0, 1)
    assert report.going == [(7, 1), (11, 4)]


def test_the_newest_demand_is_kept_while_nobody_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    demand = Demand()
    for n in range(MOST_ROWS + 5):
        demand.arrived(n, n, None, float(n))
        demand.finished(n, 1)
    report = demand.report("m", "main", [], [], float(MOST_ROWS + 5))
    assert len(report.arrivals) == len(report.outputs) == MOST_ROWS
    assert (report.arrivals[0].prompt_tokens, report.arrivals[-1].age_ms) == (5, 1000.0)


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
