"""A burst with one prefix over several frontends and simulated workers, everything but Ray."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from tests.unit.app_rig import App, prompt

FRONTENDS, PREFILLS, REQUESTS = 4, 4, 64
MS_PER_TOKEN = 0.05  # of the workers, and what routers believe before they have seen any
PREFIX, OWN = 600, 200


@pytest.mark.parametrize("cached", [True, False], ids=["cached_on_one", "cached_nowhere"])
async def test_burst_of_one_prefix_does_not_herd(cached: bool) -> None:
    """64 requests at one moment. The busiest worker takes its fair share and what its cache justifies:
    (1 + lambda) times the time it saves, in requests; and one more for each other router: they are whole.

    Everything shares one event loop here, so what workers tell can come late: the best of three bursts.
    """
    saved_ms, own_ms = PREFIX * MS_PER_TOKEN, OWN * MS_PER_TOKEN
    justified = (1 + 1.0) * saved_ms / own_ms
    busiest = [max((await burst(cached)).values()) for _ in range(3)]
    assert min(busiest) <= REQUESTS / PREFILLS + justified + FRONTENDS - 1


async def burst(cached: bool) -> Counter[str]:
    """Requests by the worker that computed their prompts."""
    profile = {"prefill_ms_per_token": MS_PER_TOKEN}
    async with App(
        prefill=PREFILLS, frontends=FRONTENDS, profile=profile, frontend={"replicas": FRONTENDS}
    ) as app:
        if cached:
            await app.complete(prompt(PREFIX), max_tokens=2)
        answers = await asyncio.gather(
            *(
                app.complete(prompt(PREFIX) + prompt(OWN, salt=n + 1), n % FRONTENDS, max_tokens=2)
                for n in range(REQUESTS)
            )
        )
    return Counter(answer.reply.headers["x-kvrelay-prefill"] for answer in answers)
