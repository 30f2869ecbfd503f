"""The faults that a test orders of the fake engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Knobs:
    """How slow the machine is, and what goes wrong. A number counts down."""

    step_s: float = 0.0
    transfer_s: float = 0.0
    lost_notices: int = 0  # transfers that never end for their receiver
    hang: bool = False  # no step any more, and nobody is told
    request_errors: int = 0  # requests that end in a RequestError at their third token
    leak_cancelled: bool = False  # their blocks never come back
    poll_errors: int = 0  # polls of events that raise
    events_off: bool = False
    drop_events: int = 0  # events that get a number and are never seen
    no_parents: bool = False  # stored events without their parent
    small_window: bool = False  # a second window beside the first
    hex_hashes: bool = False
    null_batching: bool = False  # inflightBatchingStats is null
    cancelled: int = 0  # requests that end as cancelled, though nobody asked
    timed_out: int = 0
