"""Frames that merge several steps must mean what the steps meant one after another."""

from __future__ import annotations

from serving.engine.base import BlockHash, BlockStates, Load, StepOutput, StoredRun
from serving.outbox import Outgoing
from serving.wire import pack_u64

LOAD = Load(1, 0, 0, 0, 0, 0.0, False, BlockStates(1, 0, 0, 0, 0, 1))
A, B = BlockHash(1), BlockHash(2)


def test_a_block_stored_and_then_removed_never_share_a_frame():
    going = Outgoing([])
    going.add_events(StepOutput(LOAD, stored=[StoredRun(None, [A])]))
    assert going.undone_by(StepOutput(LOAD, removed=[A]))
    assert not going.undone_by(StepOutput(LOAD, removed=[B]))


def test_a_block_removed_and_then_stored_again_may():
    going = Outgoing([])
    going.add_events(StepOutput(LOAD, removed=[A]))
    again = StepOutput(LOAD, stored=[StoredRun(None, [A])])
    assert not going.undone_by(again)
    going.add_events(again)
    events = going.events(7)
    assert events.removed == pack_u64([A])
    assert [run.hashes for run in events.stored] == [pack_u64([A])]
