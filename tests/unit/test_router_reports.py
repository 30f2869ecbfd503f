"""What the router makes of reports: others' work, its own counted once, several frontends, times learnt."""

from __future__ import annotations

from collections import Counter

import pytest

from kvrouter.deadline import Order
from kvrouter.perf_model import WorkerModels
from kvrouter.policy_router import build_router
from tests.unit.router_rig import MS_PER_TOKEN, Report, finish, place, request, router, tell_cached, view

# ---------------------------------------------------------------- what workers report


def test_what_the_worker_found_corrects_the_prediction() -> None:
    target = router(prefill=1, decode=1, local=False, order=Order.FIFO)
    place(target, 1, request(4000, own=1))
    target.begun(1, 3000, 0.0)
    assert target.choose(request(own=2), 0.0).reasons["p0"]["wait_ms"] == pytest.approx(50)


def test_reports_tell_of_other_frontends_work() -> None:
    target = router(prefill=2, decode=1, local=False)
    target.on_load("p0", Report(running=1, waiting=3, waiting_tokens=8000), 0.0)
    choice = target.choose(request(), 0.0)
    assert choice.prefill == "p1"
    assert choice.reasons["p0"]["wait_ms"] == pytest.approx(400)
    assert target.choose(request(), 0.3).reasons["p0"]["wait_ms"] == pytest.approx(100)


def test_an_idle_report_ends_old_work_and_keeps_new() -> None:
    target = router(prefill=1, decode=1, local=False, order=Order.FIFO)
    place(target, 1, request(4000, own=1), now_s=0.0)
    place(target, 2, request(2000, own=2), now_s=0.1)
    target.on_load("p0", Report(), 0.105)  # the second is still on its way
    assert target.choose(request(own=3), 0.105).reasons["p0"]["wait_ms"] == pytest.approx(100)


def test_a_report_does_not_know_what_came_during_its_step() -> None:
    """A step of 50 ms ends at 0.1: what was sent at 0.06 is in no report yet, and all of it is to do."""
    target = router(prefill=1, decode=1, local=False, order=Order.FIFO)
    place(target, 1, request(4000, own=1), now_s=0.0)
    place(target, 2, request(2000, own=2), now_s=0.06)
    target.on_load("p0", Report(running=1, waiting_tokens=2000, step_ms=50), 0.1)
    assert target.choose(request(own=3), 0.1).reasons["p0"]["wait_ms"] == pytest.approx(200)


def test_others_work_is_told_beside_what_is_cached_of_ours() -> None:
    """Of our 4000 tokens 3000 are cached, so a report of 5000 tells of 4000 that others sent."""
    target = router(prefill=1, decode=1, local=False, order=Order.FIFO)
    ours = request(4000, prefix=3000)
    tell_cached(target, "p0", request(3000, prefix=3000))
    place(target, 1, ours)
    target.on_load("p0", Report(running=1, waiting=1, waiting_tokens=5000), 0.0)
    assert target.choose(request(own=2), 0.0).reasons["p0"]["wait_ms"] == pytest.approx(250)


def test_a_prefix_still_computing_is_not_taken_for_others_work() -> None:
    """We count on it; the worker counts a waiting prompt by what it had when that came."""
    target = router(prefill=1, decode=1, local=False, order=Order.FIFO)
    for i in (1, 2):
        place(target, i, request(4000, prefix=3000, own=i))
    target.on_load("p0", Report(running=1, waiting=1, waiting_tokens=8000), 0.0)
    assert target.choose(request(own=3), 0.0).reasons["p0"]["wait_ms"] == pytest.approx(250)


def test_own_work_is_not_counted_twice_by_reports() -> None:
    target = router(prefill=1, decode=1, local=False, order=Order.FIFO)
    place(target, 1, request(4000, own=1))
    target.on_load("p0", Report(running=1, waiting_tokens=4000), 0.1)
    assert target.choose(request(own=2), 0.1).reasons["p0"]["wait_ms"] == pytest.approx(100)


def test_attention_of_a_long_prompt_survives_a_report() -> None:
    """A report counts tokens; what they take follows from the prompt they belong to."""
    target = build_router(models=lambda: WorkerModels.from_priors(prefill=(0.0, 0.05, 1e-5)), local=False)
    for ident, role in (("p0", "prefill"), ("d0", "decode")):
        target.add_worker(view(ident, role))
    place(target, 1, request(40_000, own=1))  # 2 s, and 8 s of attention
    target.on_load("p0", Report(running=1, waiting_tokens=40_000), 0.1)
    assert target.load_of("p0").backlog_ms(0.1) == pytest.approx(9900)
    target.on_load("p0", Report(running=1, waiting_tokens=10_000), 0.2)
    assert target.load_of("p0").backlog_ms(0.2) == pytest.approx(2500)


# ---------------------------------------------------------------- several frontends


@pytest.mark.parametrize("cached", [True, False], ids=["cached on one", "cached nowhere"])
def test_burst_over_several_frontends_does_not_herd(cached: bool) -> None:
    """64 requests with one prefix at one moment, over 4 routers that know nothing of each other and get no
    report. The busiest of 8 workers takes its fair share, 8, and what regret justifies: (1 + lambda) times
    the time that its cache saves, in requests; and one more for each other router: they are whole.
    """
    routers = [router(prefill=8, decode=1, local=False, seed=seed, frontends=4) for seed in range(4)]
    prompt, prefix = 2000, 1500
    if cached:
        for one in routers:
            tell_cached(one, "p0", request(prompt, prefix=prefix))
    places = Counter(place(routers[i % 4], i, request(prompt, prefix=prefix, own=i + 1)) for i in range(64))
    saved_ms, own_ms = prefix * MS_PER_TOKEN, (prompt - prefix) * MS_PER_TOKEN
    justified = (1 + 1.0) * saved_ms / own_ms
    assert max(places.values()) <= 64 / 8 + justified + 3
    assert len(places) >= 4


def test_reports_between_arrivals_even_frontends_out() -> None:
    """Unrelated requests, 4 routers: with a report after every round nobody gets twice the fair share."""
    routers = [router(prefill=8, decode=1, local=False, seed=seed, frontends=4) for seed in range(4)]
    places: Counter[str] = Counter()
    for i in range(64):
        now_s = (i // 4) * 0.025
        places[place(routers[i % 4], i, request(2000, own=i), now_s)] += 1
        if i % 4 == 3:
            for ident, count in places.items():
                work = Report(running=1, waiting=count - 1, waiting_tokens=2000 * count)
                for one in routers:
                    one.on_load(ident, work, now_s + 0.021)
    assert max(places.values()) <= 16


# ---------------------------------------------------------------- learning


def test_prefill_times_are_learnt_from_what_happens() -> None:
    """The prior says 20k tokens/s, the worker does 5k."""
    target = router(prefill=1, decode=1, local=False)
    now_s = 0.0
    for i in range(60):
        size = 500 + 137 * (i % 20)
        place(target, i, request(size, own=i), now_s)
        target.begun(i, 0, now_s)
        now_s += size * 0.2 / 1e3
        finish(target, i, now_s)
    assert target.choose(request(5000, own=99), now_s).predicted_ttft_ms == pytest.approx(1000, rel=0.1)


def test_a_prompt_began_when_the_step_began_that_tells_so() -> None:
    """Two steps of 50 ms a prompt; the first one's report says `begun` when half is done."""
    target = router(prefill=1, decode=1, local=False)
    now_s = 0.0
    for i in range(40):
        place(target, i, request(1000, own=i), now_s)
        now_s += 0.05
        target.on_load("p0", Report(running=1, waiting_tokens=500, step_ms=50), now_s)
        target.begun(i, 0, now_s)
        now_s += 0.05
        target.on_load("p0", Report(step_ms=50), now_s)
        finish(target, i, now_s)
    assert target.choose(request(1000, own=99), now_s).predicted_ttft_ms == pytest.approx(100, rel=0.03)


def test_step_times_are_learnt_from_reports() -> None:
    target = router(prefill=1, decode=1, local=False)
    for i in range(100):
        batch = 1 + i % 30
        target.on_load("d0", Report(batch, free_blocks=10_000 - batch * 20, step_ms=30 + batch), i * 0.03)
    target.on_load("d0", Report(9, free_blocks=10_000 - 180), 3.0)
    assert target.choose(request(1000), 3.0).predicted_itl_ms == pytest.approx(40, rel=0.1)
