"""A router over workers of several KV layouts: pairs, pulls and moves stay within one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from kvrouter.hashing import block_hashes
from kvrouter.policies.registry import POLICY_NAMES
from kvrouter.policy_router import PolicyRouter
from kvrouter.requeue import is_sooner_elsewhere
from kvrouter.router import WorkerView
from serving.errors import NoWorker
from serving.wire import Events, Stored, pack_u64
from tests.unit.router_rig import BLOCK, NAMESPACE, Report, finish, place, request, router

OLD, NEW = "old", "new"
SIZES = {OLD: BLOCK, NEW: BLOCK // 2}


def view(name: str, *, draining: bool = False, total_blocks: int = 10_000) -> WorkerView:
    """`name`: as in "new-p0"."""
    layout, own = name.split("-")
    role = {"p": "prefill", "d": "decode"}[own[0]]
    return WorkerView(name, role, SIZES[layout], total_blocks, 256, draining, layout)


def mixed(*names: str, leaving: Sequence[str] = (), **options: object) -> PolicyRouter:
    target = router(**options)  # type: ignore[arg-type]
    for name in names:
        target.add_worker(view(name, draining=name in leaving))
    return target


def tell_cached(target: PolicyRouter, name: str, n_tokens: int, own: int = 0) -> None:
    """The worker holds the whole prompt, in blocks of its own size."""
    size = SIZES[layout(name)]
    hashes = block_hashes(request(n_tokens, own=own).tokens, size, NAMESPACE)
    assert target.on_events(name, 1, Events(1, [Stored(None, pack_u64(list[int](hashes)))], b""))


def layout(name: str) -> str:
    return name.partition("-")[0]


EVERYBODY = [f"{one}-{own}" for one in (OLD, NEW) for own in ("p0", "p1", "d0", "d1")]


# ---------------------------------------------------------------- pairs


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_pairs_are_of_one_layout(policy: str, local: bool) -> None:
    target = mixed(*EVERYBODY, policy=policy, local=local)
    pairs = Counter[tuple[str | None, str]]()
    for n in range(200):
        wanted = request(1000, own=n)
        choice = target.choose(wanted, n * 0.01)
        pairs[choice.prefill, choice.decode] += 1
        place(target, n, request(1000, own=n), n * 0.01)
        if n >= 20:
            finish(target, n - 20, n * 0.01)
    assert all(prefill is None or layout(prefill) == layout(decode) for prefill, decode in pairs)
    assert {layout(decode) for _, decode in pairs} == {OLD, NEW}
    if not local:
        assert all(prefill is not None for prefill, _ in pairs)


def test_equal_layouts_share_the_load_evenly() -> None:
    target = mixed(*EVERYBODY)
    counts = Counter(layout(place(target, n, request(1000, own=n))) for n in range(200))
    assert 70 <= counts[NEW] <= 130


@pytest.mark.parametrize("local", [False, True])
def test_a_layout_gets_what_its_workers_can_do(local: bool) -> None:
    """One new pair beside four old ones: a fifth of what comes, and of what runs."""
    old = [f"old-{own}{n}" for own in "pd" for n in range(4)]
    target = mixed(*old, "new-p0", "new-d0", local=local)
    counts = Counter[str]()
    for n in range(500):  # 20 ms apart; a prompt takes 50 ms, an answer a second
        counts[layout(place(target, n, request(1000, own=n), n * 0.02))] += 1
        if n >= 5:
            target.computed(n - 5, n * 0.02)
            target.progress(n - 5 + 1_000_000, 1)
        if n >= 50:
            finish(target, n - 50, n * 0.02)
    assert 80 <= counts[NEW] <= 120
    running = [target.load_of(f"{one}-d0").in_flight for one in (OLD, NEW)]
    assert abs(running[0] - running[1]) <= 3


def test_the_pair_that_answers_sooner_is_taken() -> None:
    target = mixed(*EVERYBODY)
    for own in ("p0", "p1"):
        target.on_load(f"old-{own}", Report(waiting=4, waiting_tokens=40_000), 0.0)  # 2 s
    assert layout(target.choose(request(), 0.0).decode) == NEW


def test_a_prefix_decides_between_layouts() -> None:
    target = mixed("old-p0", "old-d0", "new-p0", "new-d0", local=False)
    tell_cached(target, "new-p0", 4000)
    choice = target.choose(request(4000), 0.0)
    assert (choice.prefill, choice.decode) == ("new-p0", "new-d0")
    assert choice.cached_tokens == 3999


def test_room_decides_before_time() -> None:
    target = mixed("old-p0", "new-p0", "new-d0", local=False)
    target.add_worker(view("old-d0", total_blocks=5))
    tell_cached(target, "old-p0", 2000)
    assert target.choose(request(2000), 0.0).decode == "new-d0"


@pytest.mark.parametrize("one", [OLD, NEW])
def test_bookings_are_in_the_blocks_of_their_worker(one: str) -> None:
    """Whichever layout was looked at last."""
    other = NEW if one is OLD else OLD
    target = mixed(f"{one}-p0", f"{one}-d0", f"{other}-p0", f"{other}-d0", local=False)
    for own in ("p0", "d0"):
        target.on_load(f"{other}-{own}", Report(waiting=4, waiting_tokens=40_000), 0.0)
    wanted = request(1000)
    assert place(target, 1, wanted) == f"{one}-p0"
    assert wanted.hashes == block_hashes(wanted.tokens, SIZES[one], NAMESPACE)
    (booking,) = target.load_of(f"{one}-d0").bookings.values()
    assert booking.blocks == -(-(1000 + 64) // SIZES[one])
    second = target.choose(request(1000), 0.0)
    assert second.prefill == f"{one}-p0"
    assert second.cached_tokens == 999, "what still computes counts"


# ---------------------------------------------------------------- in a rollout


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("leaving", [[], ["old-p0"]], ids=["gone", "leaving"])
def test_without_a_pair_decode_workers_compute(leaving: list[str], local: bool) -> None:
    """The prefill pool has been replaced, the decode pool has not."""
    target = mixed("new-p0", "old-d0", *leaving, leaving=leaving, local=local)
    choice = target.choose(request(), 0.0)
    assert (choice.prefill, choice.decode) == (None, "old-d0")


def test_no_pair_with_a_layout_that_only_leaves() -> None:
    target = mixed("old-p0", "old-d0", "new-d0", leaving=["old-p0", "old-d0"])
    choice = target.choose(request(), 0.0)
    assert (choice.prefill, choice.decode) == (None, "new-d0")


def test_who_leaves_is_asked_when_nobody_else_decodes() -> None:
    target = mixed("old-p0", "old-d0", "new-p0", leaving=["old-p0", "old-d0"])
    choice = target.choose(request(), 0.0)
    assert (choice.prefill, choice.decode) == (None, "old-d0")


def test_a_failed_pair_is_not_taken_again() -> None:
    target = mixed("old-p0", "old-d0", "new-p0", "new-d0", local=False)
    choice = target.choose(request(avoid=frozenset({"old-p0", "old-d0"})), 0.0)
    assert (choice.prefill, choice.decode) == ("new-p0", "new-d0")
    choice = target.choose(request(avoid=frozenset({"old-p0", "new-p0"})), 0.0)
    assert choice.prefill is None


def test_a_request_that_must_not_be_handed_over_is_computed_where_it_decodes() -> None:
    for target in (mixed("old-p0", "old-d0", local=False), mixed(*EVERYBODY, local=False)):
        assert target.choose(request(handoff=False), 0.0).prefill is None
        with pytest.raises(NoWorker):
            target.choose_decode(request(handoff=False), "old-d0", 0.0)


def test_one_layout_again_when_the_last_old_worker_is_gone() -> None:
    """Then all is as before: also who leaves and is the only one of its role."""
    target = mixed("old-d0", "new-p0", "new-d0", leaving=["new-p0"], local=False)
    assert target.choose(request(), 0.0).prefill is None
    target.remove_worker("old-d0")
    assert target.choose(request(), 0.0).prefill == "new-p0"


def test_prompts_that_wait_may_go_to_the_other_layout() -> None:
    """Nothing of them is computed yet."""
    target = mixed("old-p0", "old-d0", "new-p0", "new-d0", local=False)
    first = request(1000)
    where = place(target, 1, first)
    target.on_load(where, Report(waiting=9, waiting_tokens=90_000), 0.0)
    assert is_sooner_elsewhere(target, 1, request(1000, avoid=frozenset({where})), 0.5)
    assert target.can_spare("old-d0")


# ---------------------------------------------------------------- pulls and moves


def test_pulls_are_of_one_layout() -> None:
    """Equal block sizes, as when the dtype changes: the hashes are the same, the bytes are not."""
    target = router(pull=True, local=False)
    for one in (OLD, NEW):
        for role, names in (("prefill", ("p0", "p1")), ("decode", ("d0",))):
            for own in names:
                target.add_worker(WorkerView(f"{one}-{own}", role, BLOCK, 10_000, 256, layout=one))
    hashes = list[int](block_hashes(request(80_000).tokens, BLOCK, NAMESPACE))
    for name, n_blocks in (("old-p0", 800), ("new-p0", 400)):
        target.on_events(name, 1, Events(1, [Stored(None, pack_u64(hashes[:n_blocks]))], b""))
    for name in ("old-p0", "old-p1", "new-p0"):
        target.on_load(name, Report(waiting=9, waiting_tokens=200_000), 0.0)  # 10 s
    choice = target.choose(request(80_000), 0.0)
    assert choice.prefill == "new-p1"
    assert choice.pull_from == "new-p0", "less than old-p0 has, but it can be read"
    assert choice.pull_tokens == 40_000


def test_moves_are_of_one_layout() -> None:
    target = mixed("old-d0", "old-d1", "new-d0", "new-d1")
    for name in ("old-d1", "new-d1"):
        target.on_load(name, Report(running=50), 0.0)
    wanted = request(1000)
    choice = target.choose_decode(wanted, "old-d0", 0.0)
    assert (choice.prefill, choice.decode) == ("old-d0", "old-d1")
    assert wanted.hashes == block_hashes(wanted.tokens, SIZES[OLD], NAMESPACE)
    assert target.choose_decode(request(1000), "new-d0", 0.0).decode == "new-d1"


def test_nobody_of_its_layout_to_move_to() -> None:
    target = mixed("old-d0", "old-d1", "new-d0", leaving=["old-d0", "old-d1"])
    with pytest.raises(NoWorker):
        target.choose_decode(request(), "old-d0", 0.0)
    target.remove_worker("old-d0")
    with pytest.raises(NoWorker):
        target.choose_decode(request(), "old-d0", 0.0)


# ---------------------------------------------------------------- all alike


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_layout_that_all_have_changes_nothing(policy: str) -> None:
    """Choices, their reasons and the random draws are those of workers that tell no layout."""
    told, untold = router(policy=policy, pull=True, seed=3), router(policy=policy, pull=True, seed=3)
    for role, count in (("prefill", 3), ("decode", 3)):
        for n in range(count):
            told.add_worker(WorkerView(f"{role}{n}", role, BLOCK, 10_000, 256, layout="one"))
            untold.add_worker(WorkerView(f"{role}{n}", role, BLOCK, 10_000, 256))
    for n in range(60):
        wanted = [request(2000, prefix=1000, own=n % 7, session=f"s{n % 5}") for _ in range(2)]
        assert told.choose(wanted[0], n * 0.02) == untold.choose(wanted[1], n * 0.02)
        for target, one in zip((told, untold), wanted, strict=True):
            place(target, n, one, n * 0.02)
            if n >= 9:
                finish(target, n - 9, n * 0.02)
