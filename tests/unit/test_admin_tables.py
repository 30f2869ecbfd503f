"""What `kvrelay admin` shows a person of workers and of the planner."""

from __future__ import annotations

import time
from typing import Any

import pytest

from serving.admin_tables import WIDTH, planner_summary, table, workers_table
from tests.unit.admin_rig import EMPTY, planner, variant, worker


def test_numbers_stand_right_and_unknown_is_a_dash() -> None:
    assert table([["a", "n"], ["bb", 1000], ["c", None]], left=1) == "a      n\nbb  1000\nc      -"


@pytest.mark.parametrize(
    ("told", "state"),
    [
        (worker("w"), "serving"),
        (worker("w", role="prefill"), "plays prefill"),
        (worker("w", ordered_to_drain=True), "draining"),
        (worker("w", draining=True), "draining"),
        (EMPTY, "safe to remove"),
        (worker("w", reported=False), "silent"),
        (
            {**{k: worker("w")[k] for k in ("worker", "model", "variant", "pool")}, "reported": False,
             "ordered_to_drain": False, "safe_to_remove": False},
            "silent",
        ),
    ],
    ids=["serving", "lent", "ordered", "draining", "empty", "silent", "never reported"],
)  # fmt: skip
def test_a_worker_is_one_line(told: dict[str, Any], state: str) -> None:
    heading, line = workers_table({"workers": [told]}).splitlines()
    assert heading.split()[:4] == ["worker", "variant", "pool", "state"]
    assert f"chat/main  decode  {state}" in line


def test_workers_stand_by_variant_then_prefill_first() -> None:
    there = [worker("b"), worker("a"), worker("z", "prefill"), worker("c", "prefill", variant="canary")]
    lines = workers_table({"workers": there}).splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["c", "z", "a", "b"]
    assert workers_table({"workers": []}) == "no worker is linked"


def test_the_planner_as_a_person_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "localtime", time.gmtime)
    assert planner_summary(planner()) == (
        """\
mode    act: scales the pools
budget  8 GPUs

variant    pool     ready  starting  lent  leaving  wanted
chat/main  prefill      1         0     0        0       1
chat/main  decode       2         1     0        0       4
frontends               1         -     -        -       1

chat/main
  targets  TTFT 800 ms + 50 a 1,000 tokens, ITL 40 ms, p95
  load     3 requests/s (expected 2.5), 1 wait, ? decode
  start    23.4 s until a worker is ready
  flip     2.1 s until a worker plays its other role
  reason   as needed

last changes
  00:16:43  chat/main prefill 1 -> 2: as needed
  00:16:42  chat/main decode 2 -> 3: up"""
    )


LONG = "hold: " + "because of something that takes many words to say " * 5


def test_a_planner_that_is_off_shows_nothing_of_some_time_ago() -> None:
    lines = planner_summary(planner(mode="off", budget=1.0, history=[])).splitlines()
    assert lines == [
        "mode    off: decides nothing; `planner mode=advise` or `mode=act` starts it",
        "budget  1 GPU",
        "",
        "chat/main",
        "  targets  TTFT 800 ms + 50 a 1,000 tokens, ITL 40 ms, p95",
        "  start    23.4 s until a worker is ready",
        "  flip     2.1 s until a worker plays its other role",
    ]


@pytest.mark.parametrize(
    ("told", "says"),
    [
        (planner(mode="off", observation=None, decision=None, history=[], startup_s={}),
         "`planner mode=advise`"),
        (planner(observation=None, decision=None, history=[]), "no decision yet"),
        (planner(trouble="Serve did not answer"), "holds   Serve did not answer"),
        (planner(decision={"variants": {"chat/main": variant(1, 3, 1)}, "frontends": 2, "reason": ""}),
         "1 of decode shall play prefill"),
        (planner(decision={"variants": {"chat/main": variant(1, 3, -2)}, "frontends": 2, "reason": ""}),
         "2 of prefill shall play decode"),
        (planner(decision={"variants": {"chat/main": {**variant(1, 3), "reachable": "ITL 62 ms"}},
                           "frontends": 2, "reason": ""}),
         "no number of workers can meet the targets: ITL 62 ms"),
        (planner(decision={"variants": {"chat/main": variant(1, 3, reason=LONG)}, "frontends": 2,
                           "reason": ""}),
         "\n           "),
        (planner(history=[{"at_s": tick, "mode": "advise", "variants": {"chat/main": variant(1, tick)}}
                          for tick in range(1, 30)]),
         "decode 28 -> 29 (advise only)"),
    ],
    ids=["off", "before the first tick", "trouble", "lent", "lent the other way", "out of reach", "long",
         "many changes"],
)  # fmt: skip
def test_the_planner_in_other_states(told: dict[str, Any], says: str) -> None:
    lines = planner_summary(told)
    assert says in lines
    assert all(len(line) <= WIDTH for line in lines.splitlines())
    assert lines.count("->") <= 8
