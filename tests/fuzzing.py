"""What fuzz tests share: how long they look (seconds in CI, more with `--hypothesis-profile=fuzz-long`),
mutations, and a bound on memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

SLOW_MACHINES = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.differing_executors]


LONG = "fuzz-long"


def register_profiles() -> None:
    settings.register_profile(
        LONG, max_examples=20_000, deadline=None, print_blob=True, suppress_health_check=SLOW_MACHINES
    )


def fuzzed(max_examples: int) -> settings:
    """Settings of one test: `max_examples` in CI, where every run tries the same; with the long profile
    its number, and something new every time."""
    if settings.get_current_profile_name() == LONG:
        return settings(settings.get_profile(LONG), database=None)
    return settings(
        max_examples=max_examples,
        deadline=timedelta(seconds=20),
        derandomize=True,
        database=None,
        suppress_health_check=SLOW_MACHINES,
    )


@contextmanager
def memory_under(limit_bytes: int) -> Iterator[None]:
    """What Python allocates within, at its peak, stays below `limit_bytes`."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before < limit_bytes, f"{peak - before} bytes for one input"


@st.composite
def mutated(draw: st.DrawFn, originals: list[bytes]) -> bytes:
    """One of `originals` with a few bytes changed, cut out, doubled or put in, or its end cut off."""
    data = bytearray(draw(st.sampled_from(originals)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        size = draw(st.integers(1, 8))
        match draw(st.sampled_from(["change", "flip", "cut", "double", "insert", "end"])):
            case "change":
                data[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
            case "flip" if data:
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del data[at : at + size]
            case "double":
                data[at:at] = data[at : at + size]
            case "insert":
                data[at:at] = draw(st.binary(max_size=size))
            case "end":
                del data[at:]
    return bytes(data)


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    """`data` in pieces, as it may arrive; always one at least."""
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]
