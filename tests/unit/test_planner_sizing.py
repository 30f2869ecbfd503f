"""planner.sizing: decode by Little's law and by what is in flight, targets by class, what cannot be met."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from planner.observation import Arrival, FittedTimes, VariantSeen
from planner.settings import Targets
from planner.sizing import Sizer
from tests.unit.planner_rig import TIMES, pools, seen, variant


def test_decode_follows_littles_law() -> None:
    """50 requests/s of 100 tokens at 40 ms: 200 in flight, each 0.2 ms of the 20 that a step has left."""
    sizer = Sizer(seen(50.0), TIMES, variant())
    floor = 50.0 * 100 * 0.040 * 0.2 / 20.0
    assert sizer.slow(math.floor(floor), 50.0) == 1.0
    assert sizer.slow(math.ceil(floor * 1.5), 50.0) < 0.01


def test_kv_room_bounds_decode() -> None:
    without = seen(50.0)
    prefill, decode = Sizer(without, TIMES, variant()).cheapest(50.0)
    full = Sizer(replace(without, kv_tokens=50_000), TIMES, variant()).cheapest(50.0)
    assert full[0] == prefill
    assert full[1] >= 2 * decode


@pytest.mark.parametrize(
    ("targets", "says"),
    [
        pytest.param(
            Targets(1000, 100, 15, 95), "ITL target 15 ms not reachable; best is 20.2 ms", id="itl"
        ),
        pytest.param(Targets(50, 0, 40, 95), "TTFT target not reachable", id="ttft"),
    ],
)
def test_impossible_targets_are_reported_with_the_best_reachable(targets: Targets, says: str) -> None:
    sizer = Sizer(seen(5.0), TIMES, variant(targets=targets))
    assert says in (sizer.unreachable or "")
    assert sizer.cheapest(5.0)[0] < 20, "nobody is ordered for what nobody can do"


def test_possible_targets_are_not_reported() -> None:
    assert Sizer(seen(5.0), TIMES, variant()).unreachable is None


def test_a_stricter_class_asks_for_more() -> None:
    base = seen(20.0)
    strict = Targets(100, 100, 25, 99)
    rows = tuple(replace(row, slo_class="gold") for row in base.recent)
    own = variant(classes={"gold": strict})
    usual = Sizer(base, TIMES, own).cheapest(20.0)
    gold = Sizer(replace(base, recent=rows), TIMES, own).cheapest(20.0)
    assert gold[0] > usual[0]
    assert gold[1] > usual[1]


def test_the_spread_of_the_times_makes_room() -> None:
    unsure: FittedTimes = replace(TIMES, step_spread=0.3)
    assert (
        Sizer(seen(50.0), unsure, variant()).cheapest(50.0)[1]
        > Sizer(seen(50.0), TIMES, variant()).cheapest(50.0)[1]
    )


# ------------------------------------------------------------ targets


def _unsure(itl_ms: float) -> Sizer:
    """20 requests/s; one sequence alone takes 20.2 ms, give or take a fifth."""
    unsure = replace(TIMES, step_spread=0.2)
    return Sizer(seen(20.0), unsure, variant(targets=replace(variant().targets, itl_ms=itl_ms)))


def test_a_stricter_itl_target_never_asks_for_less_while_it_can_be_met() -> None:
    decode = [_unsure(itl_ms).cheapest(20.0)[1] for itl_ms in (20.3, 22, 24, 25, 26, 28, 30, 40)]
    assert decode == sorted(decode, reverse=True)
    assert decode[2] > decode[3] == 13


@pytest.mark.parametrize(
    ("itl_ms", "says"),
    [
        pytest.param(20.1, "ITL target 20.1 ms not reachable; best is 20.2 ms", id="below the least"),
        pytest.param(
            24, "reachable only with almost no batch: one sequence alone takes 20.2 ms", id="just"
        ),
        pytest.param(25, None, id="with some batch"),
    ],
)
def test_an_itl_target_near_the_least_is_reported(itl_ms: float, says: str | None) -> None:
    told = _unsure(itl_ms).unreachable
    assert told is None if says is None else says in (told or "")


def test_the_spread_of_prefill_times_is_kept_free_of_the_ttft_target() -> None:
    """Prompts of 2,000 tokens take 200 ms of a target of 400: with a spread of .2, 133 is left of 200."""
    rows = replace(seen(20.0), recent=tuple(Arrival(i / 20, 2000, 2000) for i in range(2000)))
    own = variant(targets=Targets(400, 0, 40, 95))
    allowed = {}
    for spread in (0.0, 0.2, 1.5):
        sizer = Sizer(rows, replace(TIMES, prefill_spread=spread), own)
        (allowed[spread],) = {row[2] for row in sizer._rows}
        assert sizer.unreachable is None
    assert allowed == {
        0.0: pytest.approx(0.2),
        0.2: pytest.approx(0.4 / 1.2 - 0.2),
        1.5: 0.0,  # nobody should wait; but more workers do help
    }
    wants = [
        Sizer(seen(20.0), replace(TIMES, prefill_spread=spread), own).cheapest(20.0)[0]
        for spread in (0.0, 0.2, 0.5)
    ]
    assert wants == sorted(wants)
    assert wants[0] < wants[-1]


def _two_classes(strict: Targets, *, n: int = 90) -> tuple[VariantSeen, Sizer]:
    """3 requests/s of 200 ms, three in ten of class `chat`; the others have a minute."""
    generator = random.Random(2)
    at_s, rows = 0.0, []
    for _ in range(n):
        at_s += generator.expovariate(3.0)
        rows.append(Arrival(at_s, 2000, 2000, "chat" if generator.random() < 0.3 else None))
    few = replace(seen(3.0), recent=tuple(rows), recent_s=at_s)
    own = variant(targets=Targets(60_000, 100, 40, 95), classes={"chat": strict})
    return few, Sizer(few, TIMES, own)


def test_with_few_requests_the_formula_looks_at_each_classs_own_waits() -> None:
    """The median of all waits would say that nobody is late."""
    strict = Targets(300, 0, 40, 95)
    few, mixed = _two_classes(strict)
    alike = Sizer(few, TIMES, variant(targets=strict))
    for servers in (1, 2):
        late = mixed._late(servers, 3.0)
        assert late["chat"] == pytest.approx(alike._late(servers, 3.0)[None], rel=0.5)
        assert late[None] < 0.01 or servers == 1
    assert mixed.cheapest(3.0)[0] == alike.cheapest(3.0)[0] == 2
    assert Sizer(few, TIMES, variant(targets=Targets(60_000, 100, 40, 95))).cheapest(3.0)[0] == 1


def test_all_classes_are_counted_in_one_replay() -> None:
    """With hundreds of requests each class's share is what a replay with its own rows would count."""
    few, sizer = _two_classes(Targets(500, 0, 40, 95), n=600)
    late = sizer._late(2, 3.0)
    assert late["chat"] > late[None] == 0.0
    assert (
        sizer.cheapest(3.0)[0] > Sizer(few, TIMES, variant(targets=Targets(60_000, 100))).cheapest(3.0)[0]
    )


# ------------------------------------------------------------ what is in flight


def test_what_decodes_now_keeps_its_workers() -> None:
    """400 streams of weight .2 ms on 5 workers: a step of 36 ms; at 40 ms they need 4.4 of the 20 ms."""
    now = replace(seen(0.5), decoding=400, going=((100, 50),) * 400, pools=pools(1, 5))
    assert Sizer(now, TIMES, variant()).cheapest(0.5)[1] == 5
    assert not Sizer(now, TIMES, variant()).meets((1, 4), 0.5)
    assert Sizer(now, TIMES, variant()).cheapest(0.0, (1, 1)) == (1, 5)
    gone = replace(now, decoding=0, going=())
    assert Sizer(gone, TIMES, variant()).cheapest(0.5)[1] == 1


@pytest.mark.parametrize(
    ("changes", "workers"),
    [
        pytest.param({"decoding": 40}, 1, id="steps have room"),
        pytest.param({"decoding": 90}, 2, id="slower steps would keep 152 in flight"),
        pytest.param({"decoding": 90, "max_batch": 40}, 3, id="batch"),
        pytest.param({"decoding": 90, "kv_tokens": 5000}, 3, id="kv"),
        pytest.param({"decoding": 4000}, 5, id="orders nobody"),
        pytest.param({"decoding": None}, 1, id="unknown"),
    ],
)
def test_in_flight_by_batch_and_kv_and_never_more_than_are_there(
    changes: dict[str, int | None], workers: int
) -> None:
    now = replace(seen(0.5), going=((100, 50),) * 90, pools=pools(1, 5), **changes)  # type: ignore[arg-type]
    assert Sizer(now, TIMES, variant()).cheapest(0.0, (1, 1))[1] == workers


def test_long_answers_count_before_any_of_them_has_ended() -> None:
    """30 requests/s: after a while only answers of 20 tokens ended, the others have 2,000 and go on."""
    ended, going = ((1000, 20),) * 100, ((1000, 2000),) * 400
    now = replace(seen(10.0), outputs=ended, outputs_s=60.0, decoding=400, pools=pools(3, 2))
    short = Sizer(now, TIMES, variant()).cheapest(10.0)[1]
    long = Sizer(replace(now, going=going), TIMES, variant()).cheapest(10.0)[1]
    assert short <= 2
    # Four of five are longer than 2,000: at least 1,600 tokens in the mean at 40 ms, of .2 ms in 20 each.
    assert long >= math.ceil(10 * 1600 * 0.040 * 0.2 / 20)
