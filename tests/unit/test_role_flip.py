"""benchmarks.role_flip: which moments it compares."""

from __future__ import annotations

from benchmarks.fault_client import Answer, Ask
from benchmarks.role_flip import decided_s, first_answer_s


def line(at_s: float, lent: int) -> dict[str, object]:
    return {"at_s": at_s, "variants": {"sim/main": {"prefill": 1, "decode": 2, "lent": lent}}}


def answer(worker: str, first_token_s: float) -> Answer:
    headers = {"x-kvrelay-prefill": worker}
    return Answer(Ask((1,), 1), 0.0, headers=headers, times_s=[first_token_s, first_token_s + 1])


def test_the_first_time_that_it_was_wanted() -> None:
    history = [line(1.0, 0), line(2.0, 1), line(3.0, 2)]
    assert decided_s(history, "lent", 1) == 2.0
    assert decided_s(history, "lent", 3) is None


def test_the_first_token_after_it() -> None:
    answers = [answer("d0", 1.0), answer("d0", 4.0), answer("d0", 3.0), answer("p0", 2.5)]
    assert first_answer_s(answers, {"d0"}, 2.0) == 3.0
    assert first_answer_s(answers, {"d1"}, 2.0) is None
