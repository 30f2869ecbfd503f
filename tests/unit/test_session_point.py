"""Traffic weights: shares are kept, a session stays where it is, and a shift moves as few as it must."""

from __future__ import annotations

import pytest

from serving.config import PromptRange
from serving.variant_choice import Offer, choose_variant, session_point

N = 20_000
OFFERS = [Offer("main", PromptRange(), True), Offer("canary", PromptRange(), True)]


def choices(canary: float) -> list[str]:
    weights = {"main": 100 - canary, "canary": canary}
    return [choose_variant(OFFERS, weights, 10, session_point("m", f"s{n}")) for n in range(N)]


@pytest.mark.parametrize("canary", [0, 1, 10, 50, 90, 100])
def test_shares_are_the_weights(canary: int) -> None:
    share = 100 * choices(canary).count("canary") / N
    assert share == pytest.approx(canary, abs=1.0)


@pytest.mark.parametrize(("before", "after"), [(0, 10), (10, 50), (50, 100), (100, 0), (50, 10)])
def test_a_shift_moves_only_who_has_to(before: int, after: int) -> None:
    pairs = list(zip(choices(before), choices(after), strict=True))
    moved = {pair for pair in pairs if pair[0] != pair[1]}
    assert moved <= ({("main", "canary")} if after > before else {("canary", "main")})
    share = 100 * sum(a != b for a, b in pairs) / N
    assert share == pytest.approx(abs(after - before), abs=1.0)


def test_points_do_not_hang_on_the_process() -> None:
    assert session_point("m", "a") == session_point("m", "a") != session_point("m", "b")
    assert session_point("m", "a") != session_point("n", "a")
    assert 0 <= session_point("m", "") < 1
