"""Workers die, freeze and are taken away under live streams: no token is lost, none comes twice."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.fault_app import App
from benchmarks.fault_reference import SimReference
from benchmarks.fault_run import fault_asks, run_fault
from benchmarks.fault_scenarios import FAULTS

FAULT = {fault.name: fault for fault in FAULTS}
STREAMS, TOKENS = 12, 150
NOTHING = ("lost", "repeated", "wrong_usage", "other_errors", "leaked_blocks", "left_in_flight")
# A busy machine starts five interpreters in this time; what a fault may cost is benchmarks/faults.py's.
pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    ("name", "longest_gap_ms"),
    [
        ("hangup_32", 2000),
        ("sigkill_decode", 2000),
        ("sigkill_prefill_transferring", 2000),
        ("sigstop_decode", 6000),  # the silence deadline, and a busy machine's 2 s
        ("scale_down_3_to_1", 2000),
        ("sigkill_controller_draining", 2000),
    ],
)
def test_streams_go_on(
    local_app: App, sim_reference: SimReference, name: str, longest_gap_ms: float
) -> None:
    asks = fault_asks(TOKENS, streams=STREAMS)
    row = asyncio.run(run_fault(local_app, FAULT[name], sim_reference, asks))
    assert row["completed"] == row["streams"] >= STREAMS, row
    assert {field: row[field] for field in NOTHING} == dict.fromkeys(NOTHING, 0), row
    assert row["nixl_bytes"] > 0, "KV has to be on its way"
    assert row["content_errors"] == 0
    assert row["at_strength"], "what was lost is replaced, what was frozen is there again"
    assert row["max_gap_ms"] < longest_gap_ms, row


def test_a_broken_stream_is_seen(local_app: App, sim_reference: SimReference) -> None:
    """The measure itself: streams of other prompts than the reference's are no right answers."""
    asks = fault_asks(40, streams=2)
    wrong = fault_asks(40, streams=4)[2:]

    class Swapped:
        def learn(self, asks: object) -> None:
            sim_reference.learn(wrong)

        def answer(self, ask: object) -> list[str]:
            return sim_reference.answer(wrong[0])

    undisturbed = FAULT["hangup_32"]
    row = asyncio.run(run_fault(local_app, undisturbed, Swapped(), asks))
    assert row["lost"] > 0
    assert row["repeated"] > 0
