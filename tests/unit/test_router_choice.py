"""Whom the router chooses: prefixes, load, ties, prefill here or there, sessions."""

from __future__ import annotations

from collections import Counter

import pytest

from kvrouter.deadline import Order
from kvrouter.events import CacheEvents
from kvrouter.policies.registry import POLICY_NAMES
from serving.errors import NoWorker
from serving.wire import Events
from tests.unit.router_rig import MS_PER_TOKEN, Report, finish, place, request, router, tell_cached, view

# ---------------------------------------------------------------- prefixes


def test_overlap_lowers_prefill_cost() -> None:
    """The choice's own terms: 1000 tokens cost 50 ms cold, and one token's time with all of it cached."""
    target = router(prefill=2, decode=1, local=False)
    tell_cached(target, "p1", request())
    choice = target.choose(request(), 0.0)
    assert choice.prefill == "p1"
    assert choice.cached_tokens == 999, "the last token is always computed"
    assert choice.reasons["p1"]["prefill_ms"] == pytest.approx(MS_PER_TOKEN)
    assert choice.reasons["p0"]["prefill_ms"] == pytest.approx(50)
    assert choice.reasons["p0"]["regret_ms"] == pytest.approx(50 - MS_PER_TOKEN)
    assert choice.predicted_ttft_ms == pytest.approx(MS_PER_TOKEN)


def test_prefix_that_still_computes_counts() -> None:
    target = router(prefill=4, decode=1, local=False)
    first = place(target, 1, request(4000, prefix=3000, own=1))
    assert place(target, 2, request(4000, prefix=3000, own=2)) == first


def test_restarted_worker_is_cold() -> None:
    target = router(prefill=2, decode=1, local=False)
    tell_cached(target, "p1", request())
    target.on_events("p1", 2, Events(1, [], b""))
    assert target.choose(request(), 0.0).cached_tokens == 0


def test_hot_prefix_spreads() -> None:
    """100 requests with one prefix over 4 workers that do not get on with them: the busiest takes its fair
    share and what its cache saves, no more."""
    target = router(prefill=4, decode=1, local=False)
    hot = request(2000, prefix=1500)
    tell_cached(target, "p0", hot)
    places = Counter(place(target, i, request(2000, prefix=1500, own=i + 1)) for i in range(100))
    # Here (1 + lambda) * 75 ms of saving buy 150 ms of queue: 6 requests of 25 ms.
    assert max(places.values()) <= 100 / 4 + 6
    assert min(places.values()) >= 15


def test_pull_rather_than_compute() -> None:
    """p0 holds 80,000 tokens (4 s) and is busy for longer; pulling them takes 0.4 s."""
    target = router(prefill=2, decode=1, local=False, pull=True)
    long = request(81_000, prefix=80_000)
    tell_cached(target, "p0", request(80_000, prefix=80_000))
    target.on_load("p0", Report(running=1, waiting_tokens=200_000), 0.0)
    choice = target.choose(long, 0.0)
    assert (choice.prefill, choice.pull_from, choice.pull_tokens) == ("p1", "p0", 80_000)
    assert choice.predicted_ttft_ms == pytest.approx(1 + 0.005 * 80_000 + 1000 * MS_PER_TOKEN)


def test_silent_worker_is_known_by_what_was_sent_to_it() -> None:
    """No event ever comes; after the silence is noticed, own placements stand in for the cache."""
    target = router(prefill=2, decode=1, local=False, caches=CacheEvents(silent_s=5.0))
    homes = []
    for i in range(8):
        homes.append(place(target, i, request(4000, prefix=3900, own=i), float(i)))
        finish(target, i, i + 0.5)
    assert target.sweep(20.0) != []
    choice = target.choose(request(4000, prefix=3900, own=99), 20.0)
    assert choice.cached_tokens >= 3800


# ---------------------------------------------------------------- ties and load


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_sequential_load_signal(policy: str) -> None:
    """Paced traffic, nothing in flight at decision time: equal workers share it."""
    target = router(prefill=2, decode=1, policy=policy, local=False)
    places: Counter[str] = Counter()
    for i in range(200):
        places[place(target, i, request(own=i), now_s=float(i))] += 1
        finish(target, i, now_s=i + 0.5)
    assert min(places.values()) >= 60


def test_tie_break_random() -> None:
    target = router(prefill=4, decode=1, local=False, seed=3)
    names = [target.choose(request(), 0.0).prefill for _ in range(1000)]
    assert all(200 < count < 300 for count in Counter(names).values())
    again = router(prefill=4, decode=1, local=False, seed=3)
    assert names == [again.choose(request(), 0.0).prefill for _ in range(1000)]


def test_time_works_off_the_backlog() -> None:
    target = router(prefill=1, decode=1, local=False, order=Order.FIFO)
    place(target, 1, request(4000, own=1))
    assert target.choose(request(own=2), 0.0).reasons["p0"]["wait_ms"] == pytest.approx(200)
    assert target.choose(request(own=2), 0.15).reasons["p0"]["wait_ms"] == pytest.approx(50)


@pytest.mark.parametrize(("order", "wait_ms"), [(Order.FIFO, 4000.0), (Order.DEADLINE, 0.0)])
def test_wait_follows_the_workers_order(order: Order, wait_ms: float) -> None:
    """A short prompt behind a long one waits under FIFO and not under the deadline order."""
    target = router(prefill=1, decode=1, local=False, order=order)
    place(target, 1, request(80_000, own=1))
    terms = target.choose(request(own=2), 0.0).reasons["p0"]
    assert terms["wait_ms"] == pytest.approx(wait_ms)
    assert terms["delay_ms"] == pytest.approx(0.0 if order is Order.FIFO else 50.0)


# ---------------------------------------------------------------- local or remote prefill


def test_cached_prompt_is_computed_where_it_decodes() -> None:
    target = router(prefill=1, decode=1)
    tell_cached(target, "d0", request())
    choice = target.choose(request(), 0.0)
    assert choice.prefill is None
    assert choice.reasons["d0"]["local_ms"] < choice.reasons["d0"]["remote_ms"]


def test_long_prompt_keeps_off_a_busy_batch() -> None:
    target = router(prefill=1, decode=1)
    for i in range(8):
        wanted = request(100, own=i)
        wanted.choice = target.choose(wanted, 0.0)
        target.book(i, "d0", wanted, 0.0)
        target.computed(i, 0.0)
    choice = target.choose(request(4000, own=99), 0.0)
    assert choice.prefill == "p0"
    # its own 200 ms, and 200 ms for each of the 8
    assert choice.reasons["d0"]["local_ms"] == pytest.approx(9 * 200)


def test_saturated_prefill_pool_is_relieved_by_an_idle_decode_worker() -> None:
    target = router(prefill=1, decode=1)
    target.on_load("p0", Report(running=1, waiting_tokens=100_000), 0.0)
    assert target.choose(request(), 0.0).prefill is None


def test_decode_needs_room_for_the_expected_output() -> None:
    target = router(prefill=1, local=False)
    target.add_worker(view("tight", "decode", total_blocks=10))  # the prompt alone
    target.add_worker(view("roomy", "decode", total_blocks=20))
    target.on_load("roomy", Report(running=5, free_blocks=15, total_blocks=20), 0.0)
    assert target.choose(request(1000), 0.0).decode == "roomy"


def test_nobody_to_decode() -> None:
    with pytest.raises(NoWorker):
        router(prefill=2).choose(request(), 0.0)


def test_workers_that_failed_it_are_the_last_resort() -> None:
    target = router(prefill=2, decode=2, local=False)
    choice = target.choose(request(avoid=frozenset({"p0", "d1"})), 0.0)
    assert (choice.prefill, choice.decode) == ("p1", "d0")
    assert target.choose(request(avoid=frozenset({"p0", "p1"})), 0.0).prefill in ("p0", "p1")


# ---------------------------------------------------------------- sessions


def test_session_stays_but_gives_way() -> None:
    target = router(prefill=4, decode=1, local=False)
    home = place(target, 1, request(own=1, session="s"))
    finish(target, 1)
    assert place(target, 2, request(own=2, session="s"), 1.0) == home
    assert place(target, 3, request(own=3, session="s"), 1.0) != home, "50 ms of queue are more than 5"
