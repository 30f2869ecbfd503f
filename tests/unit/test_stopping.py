"""serving.engine.stopping: one rule for every place that draws or hands over a token."""

from __future__ import annotations

import pytest

from serving.engine.base import FinishReason, SamplingParams
from serving.engine.stopping import banned_token_ids, finish_reason

EOS = frozenset({2, 3})
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def params(**fields: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 10, "seed": 0, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "n_generated", "token", "reason"),
    [
        pytest.param({}, 1, 5, None, id="goes_on"),
        pytest.param({}, 10, 5, LENGTH, id="length"),
        pytest.param({}, 11, 5, LENGTH, id="beyond_length"),
        pytest.param({"max_tokens": 1}, 1, 5, LENGTH, id="max_tokens_one_exact"),
        pytest.param({}, 1, 2, STOP, id="eos"),
        pytest.param({}, 1, 3, STOP, id="any_eos_id"),
        pytest.param({}, 10, 2, STOP, id="eos_wins_over_length"),
        pytest.param({"ignore_eos": True}, 1, 2, None, id="ignore_eos"),
        pytest.param({"stop_token_ids": (7,)}, 1, 7, STOP, id="stop_token"),
        pytest.param({"stop_token_ids": (2,), "ignore_eos": True}, 1, 2, STOP, id="eos_asked_for_as_stop"),
        pytest.param({"min_tokens": 4}, 4, 2, None, id="min_tokens_not_yet"),
        pytest.param({"min_tokens": 4}, 5, 2, STOP, id="min_tokens_done"),
        pytest.param({"min_tokens": 10}, 10, 2, LENGTH, id="min_tokens_is_max_tokens"),
    ],
)
def test_finish_reason(
    fields: dict[str, object], n_generated: int, token: int, reason: FinishReason | None
) -> None:
    assert finish_reason(params(**fields), EOS, n_generated, token) is reason


@pytest.mark.parametrize(
    ("fields", "n_generated", "banned"),
    [
        pytest.param({}, 0, set(), id="no_min_tokens"),
        pytest.param({"min_tokens": 2}, 0, {2, 3}, id="min_tokens"),
        pytest.param({"min_tokens": 2}, 1, {2, 3}, id="min_tokens_last"),
        pytest.param({"min_tokens": 2}, 2, set(), id="min_tokens_done"),
        pytest.param({"min_tokens": 2, "stop_token_ids": (9,)}, 0, {2, 3, 9}, id="stop_tokens_too"),
        pytest.param({"min_tokens": 2, "ignore_eos": True}, 0, set(), id="ignored_eos_may_be_drawn"),
    ],
)
def test_banned_token_ids(fields: dict[str, object], n_generated: int, banned: set[int]) -> None:
    assert banned_token_ids(params(**fields), EOS, n_generated) == banned


def test_a_token_that_may_be_drawn_stops() -> None:
    """The two rules meet without a gap: the first position not banned is the first that stops."""
    wanted = params(min_tokens=3)
    for n_before in range(6):
        banned = 2 in banned_token_ids(wanted, EOS, n_before)
        assert banned is (finish_reason(wanted, EOS, n_before + 1, 2) is None)
