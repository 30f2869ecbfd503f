"""The live router: bookings, reports, several frontends, prefixes; with a virtual clock and no workers."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.deadline import Order
from kvrouter.events import CacheEvents
from kvrouter.hashing import block_hashes
from kvrouter.perf_model import WorkerModels
from kvrouter.policies.registry import POLICY_NAMES
from kvrouter.policy_router import PolicyRouter, build_router
from kvrouter.router import Router, RouterRequest, WorkerView
from serving.errors import NoWorker
from serving.wire import Events, Stored, pack_u64

BLOCK = 100
MS_PER_TOKEN = 0.05
NAMESPACE = 1


@dataclass
class Report:
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    free_blocks: int = 10_000
    total_blocks: int = 10_000
    step_ms: float = 10.0
    moves: int = 0
    moved_tokens: int = 0
    move_ms: float = 0.0
    queue: list[tuple[int, int, int]] | None = None
    computed_tokens: int | None = None
    decoded: tuple[int, int] | None = None


def models() -> WorkerModels:
    return WorkerModels.from_priors(prefill=(0.0, MS_PER_TOKEN, 0.0), step=(10.0, 0.1, 1e-5))


def view(ident: str, role: str, total_blocks: int = 10_000) -> WorkerView:
    return WorkerView(ident, role, BLOCK, total_blocks, max_batch=256)


def router(
    prefill: int = 0, decode: int = 0, policy: str = "ttft_regret", **options: object
) -> PolicyRouter:
    made = build_router(policy, models=models, **options)  # type: ignore[arg-type]
    _: Router = made  # the type checker reads it
    for i in range(prefill):
        made.add_worker(view(f"p{i}", "prefill"))
    for i in range(decode):
        made.add_worker(view(f"d{i}", "decode"))
    return made


def request(n_tokens: int = 1000, prefix: int = 0, own: int = 0, **options: object) -> RouterRequest:
    """`prefix` tokens are the same for all; the others follow from `own`."""
    tokens = array("I", [7] * prefix) + array("I", [1000 + own] * (n_tokens - prefix))
    return RouterRequest(tokens, NAMESPACE, max_tokens=64, **options)  # type: ignore[arg-type]


def tell_cached(target: PolicyRouter, ident: str, wanted: RouterRequest, seq: int = 1) -> None:
    """The worker's event: it holds the whole prompt."""
    hashes = block_hashes(wanted.tokens, BLOCK, NAMESPACE)
    assert target.on_events(ident, 1, Events(seq, [Stored(None, pack_u64(list[int](hashes)))], b""))


def place(target: PolicyRouter, attempt: int, wanted: RouterRequest, now_s: float = 0.0) -> str:
    """Choose and book as the coordinator does; who computes the prompt."""
    choice = target.choose(wanted, now_s)
    target.book(attempt, choice.prefill or choice.decode, wanted, now_s)
    if choice.prefill is not None:
        target.book(attempt + 1_000_000, choice.decode, wanted, now_s)
    return choice.prefill or choice.decode


def finish(target: PolicyRouter, attempt: int, now_s: float = 0.0) -> None:
    target.computed(attempt, now_s)
    for one in (attempt, attempt + 1_000_000):
        target.release(one)


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


# ---------------------------------------------------------------- bookings


def test_late_free_of_old_attempt() -> None:
    target = router(prefill=2, decode=1, local=False)
    first = place(target, 1, request())
    second = place(target, 2, request(avoid=frozenset({first})))
    assert second != first
    target.release(1)
    target.release(1)
    assert 2 in target.load_of(second).bookings


def test_removed_worker_takes_its_bookings_along() -> None:
    target = router(prefill=1, decode=1, local=False)
    place(target, 1, request())
    target.remove_worker("p0")
    assert target.in_flight == 1, "the decode side's"
    target.release(1)
    target.release(1_000_001)
    target.remove_worker("d0")
    assert target.in_flight == 0


def test_known_worker_that_is_added_again_keeps_its_bookings() -> None:
    target = router(prefill=1, decode=1, local=False)
    place(target, 1, request())
    target.add_worker(view("p0", "prefill"))
    assert 1 in target.load_of("p0").bookings


verbs = st.lists(
    st.tuples(
        st.sampled_from(["place", "begun", "computed", "progress", "release", "report", "leave", "join"]),
        st.integers(0, 15),
        st.integers(1, 40),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=60)
@given(verbs, st.sampled_from(POLICY_NAMES), st.booleans())
def test_bookings_are_conserved(steps: list[tuple[str, int, int]], policy: str, together: bool) -> None:
    """Whatever happens in whatever order: in flight is what was placed and not released, and when all is
    released every worker is as if nothing had been."""
    target = router(prefill=0 if together else 2, decode=3, policy=policy, frontends=2)
    prefills = [] if together else ["p0", "p1"]
    now_s, live = 0.0, set[int]()
    for attempt, (verb, number, size) in enumerate(steps):
        now_s += 0.01
        chosen = sorted(live)[number % len(live)] if live else 12_345
        ident = ([*prefills, "d0"])[number % (len(prefills) + 1)]
        if verb == "place":
            place(target, attempt, request(size * 50, prefix=size * 25, own=number), now_s)
            live.add(attempt)
        elif verb == "begun":
            target.begun(chosen, size, now_s)
        elif verb == "computed":
            target.computed(chosen, now_s)
        elif verb == "progress":
            target.progress(chosen, 1)
        elif verb == "release":
            finish(target, chosen, now_s)
            live.discard(chosen)
        elif verb == "report":
            target.on_load(ident, Report(size % 5, number, size * 100, 9000), now_s)
        elif verb == "leave":
            target.remove_worker(ident)
        else:
            target.add_worker(view(ident, "prefill" if ident.startswith("p") else "decode"))
        booked = sum(
            len(target.load_of(i).bookings) for i in ("p0", "p1", "d0", "d1", "d2") if has(target, i)
        )
        assert target.in_flight == booked
    for attempt in live:
        finish(target, attempt, now_s)
    assert target.in_flight == 0
    for ident in ("p0", "p1", "d0", "d1", "d2"):
        if has(target, ident):
            target.on_load(ident, Report(), now_s + 1)
            load = target.load_of(ident)
            assert (load.in_flight, load.kv_blocks, load.promised_blocks, load.queued_tokens) == (
                0,
                0,
                0,
                0,
            )
            assert load.backlog_ms(now_s + 1) == 0


def has(target: PolicyRouter, ident: str) -> bool:
    try:
        target.load_of(ident)
    except KeyError:
        return False
    return True


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
