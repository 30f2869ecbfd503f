"""What the fault benchmark demands of a row, and of the requests that it sends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import orjson
import pytest

from benchmarks.fault_app import Setup
from benchmarks.fault_client import Ask
from benchmarks.fault_load import NAMED, STOPPED, stream_asks, varied
from benchmarks.fault_real import real_asks, unsalted
from benchmarks.fault_reference import SimReference
from benchmarks.fault_scenarios import FAULTS
from benchmarks.fault_targets import late_limit_ms, misses
from benchmarks.faults import ALL, LONG, ON_NODES, SLOW_SETUP, Bench, asked_for
from benchmarks.network_faults import NETWORK_FAULTS
from benchmarks.report import Progress
from serving.errors import StartError
from serving.openai import parse_completion

FAULT = {fault.name: fault for fault in [*FAULTS, *NETWORK_FAULTS]}
SETUP = Setup()
REAL = Setup(engine={"kind": "torch"}, long_prompt_tokens=800)
# A row with nothing to complain of.
GOOD: dict[str, Any] = {
    "streams": 30,
    "completed": 30,
    "max_gap_ms": 60.0,
    "nixl_bytes": 1,
    "at_strength": True,
    "handoff_failures": 1,
    "migrations_moved": 20,
    "late_wait_ms": 100.0,
}


def found(name: str, row: dict[str, Any], setup: Setup = SETUP) -> list[str]:
    fault = FAULT[name]
    lines = misses(fault, {**dict.fromkeys(fault.demands, 1), **GOOD, **row}, setup)
    assert all(line.startswith(f"{name}: ") for line in lines)
    return [line.removeprefix(f"{name}: ") for line in lines]


@pytest.mark.parametrize("name", FAULT)
def test_nothing_to_complain_of(name: str) -> None:
    assert found(name, {}) == []


@pytest.mark.parametrize(
    ("name", "row", "says"),
    [
        ("scale_down_3_to_1", {"migrations_moved": 0}, "migrations_moved = 0; target 1 or more"),
        ("rolling_update", {"migrations_moved": 0}, "migrations_moved = 0; target 1 or more"),
        (
            "scale_down_3_to_1",
            {"migrations_moved": 13, "leaving_streams": 14},
            "migrations_moved = 13; 14 streams had to leave",
        ),
        ("rolling_update", {"resumes": 2}, "resumes = 2; target 0"),
        ("scale_down_3_to_1", {"migration_pause_ms_p99": 51.0}, "migration_pause_ms_p99 = 51.0; target 50"),
        (
            "sigkill_prefill_transferring",
            {"handoff_failures": 0},
            "handoff_failures = 0; target 1 or more",
        ),
        # Four prompts of 300 ms, 98 MB at 1 GB/s, a step, 150 ms.
        ("sigkill_prefill_computing", {"late_wait_ms": 1469.0}, "late_wait_ms = 1469.0; target 1468.3"),
        ("sigstop_prefill", {"late_wait_ms": 6469.0}, "late_wait_ms = 6469.0; target 6468.3"),
        ("sigkill_prefill_computing", {"late_wait_ms": None}, "late_wait_ms is not known"),
        ("node_removed", {"skipped": "no root"}, "skipped: no root"),
        ("hangup_32", {"failed": "TimeoutError"}, "TimeoutError"),
        ("hangup_32", {"leaked_blocks": 3}, "leaked_blocks = 3; target 0"),
        ("sigkill_decode", {"max_gap_ms": 171.0}, "max_gap_ms = 171.0; target 170"),
    ],
)
def test_a_target_that_is_missed_is_one_line(name: str, row: dict[str, Any], says: str) -> None:
    (line,) = found(name, row)
    assert line.startswith(says)


def test_a_slow_network_counts_and_a_real_model_is_measured() -> None:
    slow = late_limit_ms(FAULT["sigkill_prefill_transferring"], GOOD, SLOW_SETUP)
    assert slow == pytest.approx(4 * 300 + 4 * 6000 * 8192 / 35e3 + 20 + 150, abs=0.1)
    row = {**GOOD, "predicted_late_ms": 1000.0}
    assert late_limit_ms(FAULT["sigkill_prefill_computing"], row, REAL) == 1.5 * 1000 * 2 + 150
    assert late_limit_ms(FAULT["sigstop_prefill"], row, REAL) == 5000 + 1.5 * 1000 * 2 + 150
    assert found("sigkill_prefill_computing", {"predicted_reprefill_ms": 200.0}, REAL) == [
        "late_wait_ms has no target: how long its prompts take was not measured"
    ]


def test_what_was_asked_for_and_skipped_is_missed() -> None:
    bench = Bench(Progress(quiet=True))
    bench.skip(["node_removed"], "namespaces need root")
    report = bench.report()
    assert report["faults"] == {"node_removed": {"skipped": "namespaces need root"}}
    assert report["missed"] == ["node_removed: skipped: namespaces need root"]


def test_a_cluster_that_does_not_start_costs_its_own_faults_only() -> None:
    bench = Bench(Progress(quiet=True))
    bench.rows["hangup_32"] = GOOD
    with bench.reported([FAULT["hangup_32"], FAULT["node_removed"]]):
        raise StartError("Ray ended")
    assert bench.rows == {"hangup_32": GOOD, "node_removed": {"failed": "StartError: Ray ended"}}
    assert bench.missed == ["node_removed: StartError: Ray ended"]


def test_who_says_nothing_asks_for_what_the_model_can() -> None:
    known = [*(fault.name for fault in ALL), LONG]
    assert asked_for(known, "sim") == known
    assert set(known) - set(asked_for(known, "smollm2")) == {LONG, *ON_NODES}


# ---------------------------------------------------------------- the requests


@pytest.fixture(scope="module")
def reference() -> Iterator[SimReference]:
    reference = SimReference()
    yield reference
    reference.stop()


def test_some_end_by_a_stop_string_and_some_name_their_tokens(reference: SimReference) -> None:
    plain = stream_asks(24, prompt_tokens=16, max_tokens=250)
    reference.learn(plain)
    asks = varied(plain, reference)
    assert [n for n, ask in enumerate(asks) if ask.stop] == [n for n in range(24) if n % 8 in STOPPED]
    assert [n for n, ask in enumerate(asks) if ask.named_tokens] == [n for n in range(24) if n % 8 in NAMED]
    for kind in (STOPPED, NAMED):
        assert {ask.seed is None for n, ask in enumerate(asks) if n % 8 in kind} == {True, False}
    for before, ask in zip(plain, asks, strict=True):
        whole, shown = reference.answer(before), reference.answer(ask)
        body = parse_completion(ask.request("m").partition(b"\r\n\r\n")[2])
        if ask.stop is None:
            assert (ask.finish, ask.n_tokens, ask.n_shown, body.stop) == ("length", 250, 250, None)
            assert [word.removeprefix(" ") for word in shown] == whole
        else:
            assert ask.finish == "stop"
            assert 150 < ask.n_tokens <= 250
            text = "".join(f" {word}" for word in whole)
            assert text.partition(ask.stop)[0] == "".join(f" {word}" for word in shown)
            assert len(shown) == ask.n_shown == ask.n_tokens - 1
        assert (body.logprobs is not None) is ask.named_tokens


def test_penalties_go_out_where_an_ask_has_some() -> None:
    ask = Ask((1, 2), 4, presence_penalty=0.5)
    body = orjson.loads(ask.request("m").partition(b"\r\n\r\n")[2])
    assert (body["presence_penalty"], "frequency_penalty" in body) == (0.5, False)
    assert unsalted(replace(ask, salt="x")) == ask
    real = real_asks()
    assert {n for n, one in enumerate(real) if one.presence_penalty and one.frequency_penalty} == {0, 4}
    assert {one.seed for one in real if one.presence_penalty} == {None}
