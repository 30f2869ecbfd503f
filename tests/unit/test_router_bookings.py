"""The router's bookings: each is released once, whatever happens in whatever order."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.policies.registry import POLICY_NAMES
from kvrouter.policy_router import PolicyRouter
from tests.unit.router_rig import Report, finish, place, request, router, view


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
