"""Two workers that were paired and turn out to have KV of different layouts: the last line of defence."""

from __future__ import annotations

import pytest

from serving.wire import LAYOUT, Ended, Step
from tests.unit.coordinator_rig import Bench


def differ(bench: Bench, attempt: int) -> None:
    bench.coordinator.on_step(Step(ended=[Ended(attempt, LAYOUT, "its KV layout is b", retryable=True)]))


@pytest.mark.parametrize("token_is_out", [False, True])
def test_the_only_pair_is_not_tried_again(token_is_out: bool) -> None:
    bench = Bench()
    run, sink = bench.start()
    if token_is_out:
        bench.tokens(bench.submits("p0")[0].attempt, 0, 10)
    differ(bench, bench.submits("d0")[0].attempt)
    assert bench.cancels("p0") == [bench.submits("p0")[0].attempt]
    again = bench.submits("d0")[1]
    assert (again.mode, again.handoff) == ("local", None)
    assert run.placements == 2
    rest = [11, 12, 13] if token_is_out else [10, 11, 12, 13]
    bench.tokens(again.attempt, 4 - len(rest), *rest, ended="length")
    assert sink.tokens == [10, 11, 12, 13]
    bench.check_idle()


def test_it_goes_to_neither_of_them_when_there_are_others() -> None:
    bench = Bench(prefill=2, decode=2)
    bench.start()
    first = next(ident for ident in ("d0", "d1") if bench.submits(ident))
    differ(bench, bench.submits(first)[0].attempt)
    (other,) = {"d0", "d1"} - {first}
    (again,) = bench.submits(other)
    assert again.mode == "local"
    bench.tokens(again.attempt, 0, 10, 11, 12, 13, ended="length")
    bench.check_idle()
