"""The planner at work: what it sees of frontends, workers and Serve, what it does, and what it tells."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from planner.observation import PoolSeen
from planner.observe import MOST_ROWS as MOST_SEEN
from serving.live_settings import LivePlanner, LiveSettings
from serving.planner_host import steady_time
from tests.unit.handoff_fakes import until
from tests.unit.planner_host_rig import KEY, Rig


async def test_load_that_grows_is_answered_with_replicas_and_load_that_ends_gives_them_back() -> None:
    rig = Rig()
    await rig.ticks(4, rps=2)
    assert rig.serve.calls == []
    await rig.ticks(6, rps=12)
    grown = rig.serve.targets["m-main-prefill"]
    assert grown > 1
    assert sum(rig.serve.targets[f"m-main-{pool}"] for pool in ("prefill", "decode")) <= 8
    await rig.ticks(70, rps=2)
    assert rig.serve.targets["m-main-prefill"] < grown


async def test_advise_only_reports() -> None:
    rig = Rig(mode="advise")
    await rig.ticks(8, rps=12)
    assert rig.serve.calls == []
    told = rig.host.told()
    assert told["decision"]["variants"]["m/main"]["prefill"] > 1
    assert "requests/s" in told["reason"]
    assert len(told["history"]) == 8


async def test_off_does_not_look() -> None:
    rig = Rig(mode="off")
    rig.serve.away = True
    await rig.host.tick()
    assert rig.host.told()["trouble"] is None


async def test_a_redeploy_that_put_other_counts_back_is_mended() -> None:
    rig = Rig()
    await rig.ticks(8, rps=12)
    wanted = dict(rig.serve.targets)
    rig.serve.targets["m-main-prefill"] = rig.serve.running["m-main-prefill"] = 1
    await rig.ticks(1, rps=12)
    assert rig.serve.targets == wanted


async def test_a_controller_that_is_away_is_asked_less_often_and_the_reason_is_told() -> None:
    rig = Rig()
    rig.serve.away = True
    waits = []
    for _ in range(8):
        await rig.host.tick()
        waits.append(rig.host._back_off_s)
    assert waits == sorted(waits)
    assert waits[-1] == 60
    assert rig.host.told()["trouble"] == "Serve's controller did not answer"
    rig.serve.away = False
    await rig.ticks(1, rps=2)
    assert rig.host.told()["trouble"] is None
    assert rig.host._back_off_s == 0


async def test_without_reports_it_holds_and_says_why() -> None:
    rig = Rig()
    rig.now += 5
    await rig.host.tick()
    assert rig.serve.calls == []
    assert "no frontend reports" in rig.host.told()["reason"]


async def test_mode_targets_and_budget_change_live() -> None:
    rig = Rig(mode="off")
    status, told = rig.control.admin.answer(
        "change_planner", {"mode": "advise", "budget": 4, "targets": {"m": {"itl_ms": 30}}}
    )
    assert status == 200
    assert (told["mode"], told["budget"]) == ("advise", 4)
    assert told["targets"]["m/main"]["itl_ms"] == 30
    assert told["targets"]["m/main"]["ttft_ms"] == 1000
    status, told = rig.control.admin.answer("change_planner", {"mode": "act"})
    assert (status, told["budget"]) == (200, 4)  # what is not named stays


@pytest.mark.parametrize(
    ("change", "status", "says"),
    [
        ({"mode": "wild"}, 400, "mode"),
        ({"budget": 1}, 400, "budget = 1; allowed: at least 2"),
        ({"targets": {"x": {}}}, 404, "no model 'x'; there are: m"),
        ({"targets": 3}, 400, "give them by model"),
        ({"targets": {"m": 3}}, 400, "give them by model"),
        ({"targets": {"m": {"classes": 3}}}, 400, "give them by name"),
        ({"targets": {"m": {"classes": {"chat": {}}}}}, 404, "no class 'chat'; there are: none"),
        ({"targets": {"m": {"classes": {"chat": {}}}}, "mode": "wild"}, 404, "no class"),
        ({"targets": {"m": {"itl_ms": -1}}}, 400, "planner.targets.m.itl_ms = -1"),
        ({"speed": 1}, 400, "speed"),
    ],
)
async def test_a_wrong_change_is_one_line_and_changes_nothing(
    change: dict[str, Any], status: int, says: str
) -> None:
    rig = Rig(mode="off")
    before = rig.control.settings
    answered, body = rig.control.admin.answer("change_planner", change)
    assert (answered, says in body["error"]["message"]) == (status, True), body
    assert rig.control.settings == before


async def test_what_came_while_control_was_away_is_no_burst() -> None:
    rig = Rig(mode="advise")
    rig.reports()
    rig.now += 5
    rig.reports(0.1, 0.4)
    await rig.host.tick()
    assert (rig.seen().arrivals, rig.seen().window_s) == (2, 5)
    for _ in range(6):  # half a minute without a word
        rig.now += 5
        await rig.host.tick()
        assert rig.seen().arrivals is None
        assert "no frontend reports" in rig.host.told()["reason"]
    rig.reports(*(0.5 + n for n in range(30)))
    rig.now += 1
    rig.reports(0.2)
    await rig.host.tick()
    assert rig.seen().arrivals == 4  # of the last few seconds


async def test_in_mode_off_nothing_piles_up_and_the_first_window_is_a_whole_one() -> None:
    rig = Rig(mode="off")
    for _ in range(100):
        rig.now += 5
        rig.reports(*[0.1] * 100)
        await rig.host.tick()
    assert len(rig.host.book._observers[KEY]._recent) <= 2 * MOST_SEEN
    rig.control.admin.answer("change_planner", {"mode": "advise"})
    rig.now += 5
    rig.reports(0.1, 0.2)
    await rig.host.tick()
    assert (rig.seen().arrivals, rig.seen().window_s) == (2, 5)


async def test_kv_room_is_that_of_the_variants_own_workers() -> None:
    rig = Rig(mode="advise")
    for ident, variant, blocks in (("a", "main", 100), ("b", "main", 80), ("x", "tiny", 3)):
        rig.joins(ident, variant=variant, blocks=blocks)
    await rig.host.tick()
    assert rig.seen().kv_tokens == 80 * rig.host._engine(KEY).block_tokens


async def test_a_start_that_was_taken_back_is_not_measured_by_the_next_one() -> None:
    """Else one that never came makes the planner believe that starts take hours."""
    rig = Rig()
    rig.joins("p1", "prefill", blocks=10_000)
    rig.joins("d1", blocks=10_000)
    rig.serve.starts = False
    await rig.ticks(8, rps=12)
    ordered = rig.serve.targets["m-main-prefill"]
    assert ordered > 1
    rig.serve.targets.update({"m-main-prefill": 1, "m-main-decode": 1})  # an operator
    rig.control.admin.answer("change_planner", {"mode": "advise"})
    rig.now += 3600
    await rig.ticks(1, rps=12)
    rig.control.admin.answer("change_planner", {"mode": "act"})
    await rig.ticks(1, rps=12)
    assert rig.serve.targets["m-main-prefill"] > 1
    rig.joins("p2", "prefill", blocks=10_000)
    await rig.ticks(1, rps=12)
    assert rig.host.told()["startup_s"] == {"m/main": 5.0}


async def test_without_any_linked_worker_no_pool_falls_below_its_minimum() -> None:
    """All starts seem to fail when workers cannot reach Control."""
    rig = Rig(min_replicas=2, replicas=2)
    rig.serve.targets = {"m-main-prefill": 2, "m-main-decode": 2, "Frontend": 1}
    rig.serve.running = dict(rig.serve.targets)
    for _ in range(130):
        await rig.holds(1)
        for pool in ("prefill", "decode"):
            assert rig.serve.targets[f"m-main-{pool}"] >= 2


async def test_a_worker_that_an_operator_drains_is_no_start_that_never_comes() -> None:
    """It would be taken back, and Serve would stop one of the others."""
    rig = Rig()
    for ident, pool in (("p1", "prefill"), ("d1", "decode"), ("d2", "decode")):
        rig.joins(ident, pool)
    rig.serve.targets["m-main-decode"] = rig.serve.running["m-main-decode"] = 2
    rig.control.orders.drain("d2")
    await rig.holds(130)
    assert rig.seen().pools["decode"] == PoolSeen(ready=1, draining=1)
    assert rig.serve.targets["m-main-decode"] == 2
    rig.control.orders.undrain("d2")
    await rig.holds(1)
    assert rig.seen().pools["decode"] == PoolSeen(ready=2)
    assert rig.serve.calls == []


async def test_a_drained_worker_that_falls_silent_keeps_its_place() -> None:
    """Else the pool would be one too large, and Serve would stop one that serves."""
    rig = Rig()
    for ident, pool in (("p1", "prefill"), ("d1", "decode"), ("d2", "decode")):
        rig.joins(ident, pool)
    rig.serve.targets["m-main-decode"] = rig.serve.running["m-main-decode"] = 2
    rig.control.orders.drain("d2")
    rig.falls_silent("d2")
    await rig.holds(130)
    assert rig.seen().pools["decode"] == PoolSeen(ready=1, draining=1)
    assert rig.serve.targets["m-main-decode"] == 2
    rig.serve.targets["m-main-decode"] = rig.serve.running["m-main-decode"] = 1
    rig.serve.listed = frozenset()  # Serve has taken it away; Control has not asked yet
    await rig.holds(1)
    assert rig.seen().pools["decode"] == PoolSeen(ready=1)
    assert rig.serve.calls == []


async def test_the_last_of_a_pool_is_not_removed_although_a_lent_one_plays_its_role() -> None:
    rig = Rig(mode="off")
    rig.joins("d1", drained=True)
    rig.joins("p1", "prefill", role="decode")
    status, body = rig.control.admin.answer("remove", {"worker": "d1"})
    assert (status, "it is the last of its pool" in body["error"]["message"]) == (400, True)


async def test_removals_go_one_by_one_and_leave_one() -> None:
    rig = Rig(mode="off")
    for ident in ("d1", "d2", "d3"):
        rig.joins(ident, drained=True)
    rig.joins("p1", "prefill", role="decode")
    rig.serve.removals = asyncio.Semaphore(0)
    for ident in ("d1", "d2", "d2"):
        assert rig.control.admin.answer("remove", {"worker": ident})[0] == 200
    assert rig.control.admin.answer("remove", {"worker": "d3"})[0] == 400
    for _ in range(2):
        await until(lambda: len(rig.serve.calls) % 2 == 1, 20)
        rig.serve.removals.release()
    await until(lambda: not rig.host._removals, 20)
    assert [call for call in rig.serve.calls if call[1] == -1] == [
        ("m-main-decode#d1", -1),
        ("m-main-decode#d2", -1),
    ]
    assert [value for _, value in rig.serve.calls] == [-1, 0, -1, 0]


async def test_a_pool_that_loses_a_worker_on_purpose_is_left_alone_meanwhile() -> None:
    rig = Rig()
    for ident, pool in (("p1", "prefill"), ("d1", "decode"), ("d2", "decode")):
        rig.joins(ident, pool, drained=ident == "d2")
    rig.control.orders.drain("d2")
    rig.serve.targets["m-main-decode"] = rig.serve.running["m-main-decode"] = 2
    rig.serve.removals = asyncio.Semaphore(0)
    assert rig.control.admin.answer("remove", {"worker": "d2"})[0] == 200
    await until(lambda: len(rig.serve.calls) == 1, 20)
    rig.leaves("d2")  # Serve has not noticed yet
    await rig.holds(130)
    assert rig.serve.targets["m-main-decode"] == 2
    rig.serve.removals.release()
    await until(lambda: not rig.host._removals, 20)


def test_the_clock_shows_the_time_of_day_and_never_jumps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = steady_time()
    assert abs(clock() - time.time()) < 1.0
    before = clock()
    monkeypatch.setattr(time, "time", lambda: 5.0)
    assert 0.0 <= clock() - before < 1.0


# ---------------------------------------------------------------- settings that changed around it


def below_the_minimum() -> Rig:
    """A redeploy raised min_replicas above the budget that was set live before."""
    rig = Rig(mode="act", min_replicas=2, replicas=2)
    rig.control._settings = LiveSettings(planner=LivePlanner(budget=2))
    return rig


async def test_a_live_budget_below_a_redeploys_minimum_locks_nobody_out() -> None:
    rig = below_the_minimum()
    status, told = rig.control.admin.answer("planner", {})
    assert (status, told["budget"]) == (200, 2)
    assert told["trouble"] == "planner.budget = 2; allowed: at least 4, what min_replicas cost"
    await rig.host.tick()
    assert rig.serve.calls == []
    assert rig.host.told()["trouble"] == told["trouble"]
    for mode in ("off", "advise", "act"):
        status, told = rig.control.admin.answer("change_planner", {"mode": mode})
        assert (status, told["mode"]) == (200, mode)
    assert rig.control.admin.answer("change_planner", {"budget": 3})[0] == 400, "still below"
    status, told = rig.control.admin.answer("change_planner", {"budget": 4})
    assert (status, told["trouble"] is None) == (200, False), "until the next tick"
    await rig.host.tick()
    assert rig.host.told()["trouble"] is None


async def test_lent_workers_are_called_back_when_the_planner_is_turned_off() -> None:
    rig = Rig()
    for ident, pool in (("p1", "prefill"), ("d1", "decode"), ("d2", "decode")):
        rig.joins(ident, pool)
    rig.control.orders.lend("d2", "prefill")
    assert rig.control.admin.answer("change_planner", {"mode": "advise"})[0] == 200
    assert rig.control.orders.roles == {"d2": "prefill"}
    assert rig.control.admin.answer("change_planner", {"mode": "off"})[0] == 200
    assert rig.control.orders.roles == {}


async def test_a_loan_of_before_a_redeploy_without_planner_ends() -> None:
    rig = Rig(mode="off")
    rig.control.orders.restore({"draining": ["x"], "roles": {"d2": "prefill"}})
    await rig.host.tick()
    assert (rig.control.orders.roles, rig.control.orders.draining) == ({}, {"x"})


CLASSES = {"chat": {"ttft_ms": 300, "itl_ms": 30}, "batch": {"ttft_ms": 60_000}}


async def test_targets_of_classes_change_live() -> None:
    rig = Rig(mode="off", classes=CLASSES)
    change = {"targets": {"m": {"itl_ms": 20, "classes": {"chat": {"ttft_ms": 100}}}}}
    assert rig.control.admin.answer("change_planner", change)[0] == 200
    change = {"targets": {"m": {"classes": {"chat": {"itl_ms": 10}, "batch": {"percentile": 50}}}}}
    status, told = rig.control.admin.answer("change_planner", change)
    assert status == 200
    assert told["targets"]["m/main"]["itl_ms"] == 20
    chat, batch = (told["classes"]["m/main"][name] for name in ("chat", "batch"))
    assert (chat["ttft_ms"], chat["itl_ms"]) == (100, 10)
    assert (batch["ttft_ms"], batch["percentile"]) == (60_000, 50)
    seen = rig.host.settings().variants["m/main"]
    assert (seen.targets.itl_ms, seen.classes["chat"].ttft_ms) == (20, 100)
    change = {"targets": {"m": {"classes": {"chat": {"ttft_ms": None}}}}}
    told = rig.control.admin.answer("change_planner", change)[1]
    assert told["classes"]["m/main"]["chat"]["ttft_ms"] == 300, "null: as configured"


@pytest.mark.parametrize(
    ("mode", "slo", "unreachable"),
    [
        ("act", {"ttft_ms": 1000, "itl_ms": 50}, {}),
        (
            "off",
            {"ttft_ms": 1, "ttft_ms_per_1k_tokens": 0},
            ["ttft_ms = 1 is out of reach; best is 1.1 ms"],
        ),
        ("off", {"itl_ms": 10}, ["itl_ms = 10 is out of reach; best is 10.2 ms"]),
        ("advise", {"classes": {"chat": {"itl_ms": 5}}}, ["classes.chat.itl_ms = 5 is out of reach; best"]),
    ],
)
async def test_targets_out_of_reach_are_told_at_the_start_in_every_mode(
    mode: str, slo: dict[str, Any], unreachable: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(mode=mode, slo=slo)
    await rig.host.start()
    await rig.host.stop()
    told = rig.host.told()["unreachable"]
    for text, line in zip(unreachable, told.get("m/main", []), strict=True):
        assert line.startswith(text)
        assert f"m/main: targets that no number of workers can meet: {text}" in caplog.text
    assert ("no number of workers" in caplog.text) is bool(unreachable)


async def test_a_live_target_out_of_reach_is_told_with_the_change() -> None:
    rig = Rig(mode="off")
    told = rig.control.admin.answer("change_planner", {"targets": {"m": {"itl_ms": 2}}})[1]
    assert told["unreachable"] == {"m/main": ["itl_ms = 2 is out of reach; best is 10.2 ms"]}
