"""What operators change through Control: shares of all variants or none, and a line in the log for each."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from serving.control_host import ControlHost
from serving.link import Identity
from tests.unit.planner_host_rig import Rig


@pytest.fixture
async def control() -> ControlHost:
    variants = {"sim": ["main", "canary"], "org/m": ["only"]}
    return ControlHost(me=Identity.fresh("control", "c"), key=b"k" * 32, variants=variants)


@pytest.mark.parametrize(
    ("model", "weights", "status", "says"),
    [
        (
            "sim",
            {"canary": 10},
            400,
            "no share for main; name every variant: weights sim main=SHARE canary=10",
        ),
        (
            "sim",
            {"main": 1},
            400,
            "no share for canary; name every variant: weights sim main=1 canary=SHARE",
        ),
        ("sim", {"main": 0, "canary": 0}, 400, "all are 0"),
        ("sim", {"main": 1, "x": 1}, 400, "'sim' has no variant 'x'; allowed: main, canary"),
        ("sim", {"main": -1, "canary": 2}, 400, "weights.sim.main = -1; allowed: a number, 0 or more"),
        ("x", {"main": 1}, 404, "there is no model 'x'; there are: org/m, sim"),
    ],
    ids=["one of two", "the other", "nothing", "unknown variant", "negative", "unknown model"],
)
@pytest.mark.parametrize("verb", ["weights", "change"])
async def test_shares_that_are_refused_change_nothing(
    *,
    control: ControlHost,
    caplog: pytest.LogCaptureFixture,
    model: str,
    weights: dict[str, Any],
    status: int,
    says: str,
    verb: str,
) -> None:
    asked = {"model": model, "weights": weights} if verb == "weights" else {"weights": {model: weights}}
    with caplog.at_level(logging.INFO, "kvrelay.control"):
        answered, body = control.admin.answer(verb, asked)
    assert answered == status
    assert says in body["error"]["message"]
    assert control.settings["weights"] == {}
    assert caplog.records == []


async def test_shares_are_shown_as_they_are_in_force(control: ControlHost) -> None:
    unset = {"sim": {"main": 1.0, "canary": 0.0}, "org/m": {"only": 1.0}}
    assert control.admin.answer("shares", {}) == (200, unset)
    control.admin.answer("weights", {"model": "sim", "weights": {"main": 90, "canary": 10}})
    shown = {**unset, "sim": {"main": 90.0, "canary": 10.0}}
    assert control.admin.answer("shares", {}) == (200, shown)
    control.change_settings({"weights": {"sim": {"of another configuration": 1}}})
    assert control.admin.answer("shares", {}) == (200, unset)
    assert control.admin.answer("change", {"weights": {}})[0] == 200
    assert control.admin.answer("shares", {}) == (200, unset)


def fields(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [r.fields for r in caplog.records if r.message == "changed by an operator"]  # type: ignore[attr-defined]


async def test_every_change_leaves_one_line(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(mode="off")
    for ident in ("d1", "d2", "p1"):
        rig.joins(ident, "prefill" if ident == "p1" else "decode")
    ask = rig.control.admin.answer
    peer = "frontend f"
    with caplog.at_level(logging.INFO, "kvrelay.control"):
        asked: list[tuple[str, dict[str, Any]]] = [
            ("weights", {"model": "m", "weights": {"main": 5}}),
            ("change", {"log_level": "DEBUG"}),
            ("change_planner", {"mode": "advise", "budget": 4}),
            ("change_planner", {"targets": {"m": {"itl_ms": 30}}}),
            ("drain", {"worker": "d1"}),
            ("undrain", {"worker": "d1"}),
        ]
        for verb, arguments in asked:
            assert ask(verb, arguments, peer)[0] == 200
        for verb in ("workers", "settings", "shares", "planner"):
            assert ask(verb, {}, peer)[0] == 200
    told = fields(caplog)
    assert [(line["verb"], line["peer"]) for line in told] == [(verb, peer) for verb, _ in asked]
    assert [(line["old"], line["new"]) for line in told[:3]] == [
        ({"weights": {}}, {"weights": {"m": {"main": 5.0}}}),
        ({"log_level": "INFO"}, {"log_level": "DEBUG"}),
        ({"planner.mode": None, "planner.budget": None}, {"planner.mode": "advise", "planner.budget": 4.0}),
    ]
    assert told[3]["new"]["planner.targets"]["m"]["itl_ms"] == 30
    assert [(line["worker"], line["old"], line["new"]) for line in told[4:]] == [
        ("d1", {"draining": False}, {"draining": True}),
        ("d1", {"draining": True}, {"draining": False}),
    ]


async def test_a_removal_leaves_a_line(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(mode="off")
    rig.joins("d1", drained=True)
    rig.joins("d2")
    with caplog.at_level(logging.INFO, "kvrelay.control"):
        assert rig.control.admin.answer("remove", {"worker": "d1"}, "frontend f")[0] == 200
    (line,) = fields(caplog)
    assert (line["verb"], line["worker"], line["peer"]) == ("remove", "d1", "frontend f")
