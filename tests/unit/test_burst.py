"""A burst with one prefix over several frontends and simulated workers, everything but Ray."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from kvrouter.perf_model import WorkerModels
from serving.engine.base import Mode
from serving.run import Run
from tests.unit.app_rig import LONG_S, App, prompt
from tests.unit.handoff_fakes import until

FRONTENDS, PREFILLS, REQUESTS = 4, 4, 64
MS_PER_TOKEN = 4.0  # slow beside what it costs us to place a request
PREFIX, OWN = 600, 200
HEARD_S = 0.005  # turns of the loop, which all of them share, for what a worker tells the other routers


@pytest.mark.parametrize("cached", [True, False], ids=["cached_on_one", "cached_nowhere"])
async def test_burst_of_one_prefix_does_not_herd(cached: bool) -> None:
    """64 requests, one right after the other, so that routers can hear of each other's. The busiest worker
    takes its fair share, what it computes meanwhile and what its cache justifies: (1 + lambda) times the
    time it saves, in requests; and two more for each other router: requests are whole, and hearing is late.

    Nobody waits for the answers, which would take half a minute.
    """
    saved_ms, own_ms = PREFIX * MS_PER_TOKEN, OWN * MS_PER_TOKEN
    justified = (1 + 1.0) * saved_ms / own_ms
    app = App(
        prefill=PREFILLS,
        frontends=FRONTENDS,
        profile={"prefill_ms_per_token": MS_PER_TOKEN},
        frontend={"replicas": FRONTENDS},
        admission={"mode": "off"},
    )
    for n in range(FRONTENDS):  # they know how fast workers are
        app.coordinator(n)._router._models = lambda: WorkerModels.from_priors((0.0, MS_PER_TOKEN, 0.0))  # type: ignore[attr-defined]
    async with app:
        if cached:
            await app.complete(prompt(PREFIX), max_tokens=2)
        placed: dict[Run, str] = {}
        burst = []
        began_s = asyncio.get_running_loop().time()
        for n in range(REQUESTS):
            ask = app.complete(prompt(PREFIX) + prompt(OWN, salt=n + 1), n % FRONTENDS, max_tokens=2)
            burst.append(asyncio.create_task(ask))
            await until(lambda: look(app, placed) == len(burst), LONG_S)
            await asyncio.sleep(HEARD_S)
        meanwhile = (asyncio.get_running_loop().time() - began_s) * 1e3 / own_ms
        for task in burst:
            task.cancel()
        await asyncio.gather(*burst, return_exceptions=True)
    busiest = max(Counter(placed.values()).values())
    assert busiest <= REQUESTS / PREFILLS + meanwhile + justified + 2 * (FRONTENDS - 1)


def look(app: App, placed: dict[Run, str]) -> int:
    """Note which worker is to compute each prompt; returns how many are noted."""
    for frontend in range(FRONTENDS):
        for run in app.coordinator(frontend)._live:
            for attempt in run.attempts.values():
                if attempt.mode is Mode.PREFILL:
                    placed[run] = attempt.worker
    return len(placed)
