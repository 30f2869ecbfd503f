"""planner.lengths: the mean answer, from a fresh start on and amid load; and the pools that follow."""

from __future__ import annotations

import random

import pytest

from planner.lengths import DEFAULT_OUTPUT, expected_answers
from planner.settings import Targets
from planner.sim_policies import Planner
from planner.sim_report import Criterion
from planner.sim_setup import SimSetup
from planner.simulate import H100, settings_for, simulate
from planner.workload import made_up

ITL_S = 0.04


def _mean(
    ended: list[tuple[int, int]], going: list[tuple[int, int]], tokens: float = float("inf")
) -> float:
    answers = expected_answers(ended, going, tokens)
    assert sum(share for share, _, _ in answers) == pytest.approx(1.0)
    return sum(share * output for share, _, output in answers)


def _estimate(rate: float, mean: float, since_s: float, warm_s: float) -> tuple[float, float]:
    """(estimate, mean of those that ended) when watched for `since_s` after `warm_s` of load before."""
    generator = random.Random(5)
    began_s, ended, going = -warm_s, [], []
    while True:
        began_s += generator.expovariate(rate)
        if began_s > since_s:
            break
        output = round(generator.gammavariate(2.0, mean / 2))
        end_s = began_s + output * ITL_S
        if end_s > since_s:
            going.append((100, int((since_s - began_s) / ITL_S)))
        elif end_s > 0:
            ended.append((end_s, output))
    done = [(100, output) for _, output in sorted(ended)]
    return _mean(done, going, since_s / ITL_S), sum(output for _, output in done) / len(done)


@pytest.mark.parametrize(
    ("since_s", "warm_s"),
    [
        pytest.param(100, 0, id="fresh start"),
        pytest.param(200, 0, id="later"),
        pytest.param(1000, 0, id="steady"),
        pytest.param(60, 2000, id="restarted amid load"),
        pytest.param(600, 2000, id="steady since before"),
    ],
)
def test_the_mean_is_about_right_from_the_start(since_s: float, warm_s: float) -> None:
    estimate, naive = _estimate(4.0, 2000, since_s, warm_s)
    assert estimate == pytest.approx(2000, rel=0.3)
    if since_s == 100 and not warm_s:
        assert naive < 1200, "those that ended say too little"


@pytest.mark.parametrize(
    ("ended", "going", "mean"),
    [
        pytest.param([(9, 100), (9, 300)], [], 200, id="all ended"),
        pytest.param([], [(9, 0)], DEFAULT_OUTPUT, id="nothing known"),
        pytest.param([], [(9, 1000)], 2000, id="as long again"),
        pytest.param([(9, 20)] * 99, [(9, 5)] * 20, 20, id="those that go on are not long yet"),
    ],
)
def test_small_cases(ended: list[tuple[int, int]], going: list[tuple[int, int]], mean: float) -> None:
    assert _mean(ended, going) == pytest.approx(mean, rel=0.02)


def test_streams_of_long_answers_keep_their_workers() -> None:
    """Answers of 3,000 tokens take two minutes: the first that end are the short ones. Five workers do."""
    targets = Targets(1500, 50, 50, 95)
    requests = made_up(1.0, 900.0, 1000, 3000, seed=0)
    planner = Planner(settings_for(targets, startup_s=60, budget=40))
    run = simulate(requests, planner, SimSetup(H100, initial=(1, 5)))
    workers = {sample.targets[1] for sample in run.samples if sample.at_s <= 900}
    assert 5 <= min(workers) <= max(workers) <= 7
    criterion = Criterion(targets)
    assert sum(criterion.itl_ok(job) for job in run.jobs) >= 0.99 * len(run.jobs)
