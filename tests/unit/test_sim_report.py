"""What a simulation says of itself: the criterion, who was refused, and a picture that hides nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner.settings import Targets
from planner.sim_admission import MODES, admission_for
from planner.sim_cluster import Cluster
from planner.sim_policies import Static
from planner.sim_report import Criterion, draw, summary
from planner.sim_setup import SimSetup
from planner.sim_worker import EngineTimes, Job
from planner.simulate import arguments, main
from planner.workload import TraceRequest, made_up
from serving.config import AdmissionConfig, Deadlines

TIMES = EngineTimes(prefill=(0.0, 0.1, 0.0), step=(20.0, 0.5, 0.0), move_ms=0.0)
TARGETS = Targets(300, 1000, 40)


def answered(ttft_ms: float, prompt: int = 2000, itl_ms: float = 30.0, own_ms: float = 100.0) -> Job:
    job = Job(TraceRequest(10.0, prompt, 11), prompt, 11)
    job.first_token_s = 10.0 + ttft_ms / 1e3
    job.finished_s = job.first_token_s + 10 * itl_ms / 1e3
    job.first_own_ms = own_ms
    return job


@pytest.mark.parametrize(
    ("criterion", "job", "ttft_ok"),
    [
        pytest.param(Criterion(TARGETS), answered(2300), True, id="300 ms and 1,000 for each of 2k"),
        pytest.param(Criterion(TARGETS), answered(2301), False, id="a millisecond later"),
        pytest.param(Criterion(TARGETS), answered(300, prompt=1), True, id="short"),
        pytest.param(Criterion(TARGETS), answered(400, prompt=1), False, id="short, own prefill or not"),
        pytest.param(Criterion(Targets(300, 0, 40)), answered(301), False, id="none for length"),
        pytest.param(Criterion(TARGETS, own_prefill=True), answered(400), True, id="own prefill"),
        pytest.param(Criterion(TARGETS, own_prefill=True), answered(401), False, id="and no more"),
    ],
)
def test_a_first_token_in_time(criterion: Criterion, job: Job, ttft_ok: bool) -> None:
    assert criterion.ttft_ok(job) is ttft_ok


@pytest.mark.parametrize(
    ("criterion", "says"),
    [
        (Criterion(TARGETS), "TTFT within 300 ms + 1000 ms per 1,000 prompt tokens; mean ITL within 40 ms"),
        (Criterion(Targets(300, 0, 40)), "TTFT within 300 ms; mean ITL within 40 ms"),
        (
            Criterion(TARGETS, own_prefill=True),
            "TTFT within 300 ms + own uncached prefill; mean ITL within 40 ms",
        ),
    ],
)
def test_the_criterion_says_itself(criterion: Criterion, says: str) -> None:
    assert str(criterion) == says


def overloaded(mode: str, targets: Targets = TARGETS) -> Cluster:
    """Half as much again as one prefill worker can take."""
    run = Cluster(SimSetup(TIMES, seed=1), Static(1, 1), admission_for(mode, targets))
    run.run(made_up(15.0, 120.0, 1000, 20, seed=1))
    return run


def test_a_looser_target_is_never_scored_lower() -> None:
    run = overloaded("off")
    strict, loose = (
        summary(run, Criterion(Targets(300, per_1k, 40)))["attainment"] for per_1k in (0.0, 1000.0)
    )
    assert strict < loose


def test_admission_refuses_so_that_those_it_admits_attain() -> None:
    rows = {mode: summary(overloaded(mode), Criterion(TARGETS)) for mode in MODES}
    assert rows["off"]["rejected"] == 0
    assert rows["deadline"]["rejected"] < rows["slo"]["rejected"]
    assert rows["slo"]["rejected"] == sum(rows["slo"]["rejected_for"].values()) > 100
    assert set(rows["slo"]["rejected_for"]) <= {"ttft", "itl", "kv", "share", "lane", "priority"}
    assert rows["slo"]["attainment_of_admitted"] > 0.98
    assert rows["slo"]["attainment"] > 1.5 * rows["off"]["attainment"]


def test_admission_is_told_what_a_frontend_is_told() -> None:
    doors = {mode: admission_for(mode, TARGETS) for mode in MODES}
    assert doors["off"] is None
    router = Cluster(SimSetup(TIMES), Static(1, 1))._router
    held = {mode: door(router)._admission._slo for mode, door in doors.items() if door is not None}
    assert (held["slo"].ttft_ms, held["slo"].ttft_ms_per_1k_tokens, held["slo"].itl_ms) == (300, 1000, 40)
    assert (held["deadline"].ttft_ms, held["deadline"].ttft_ms_per_1k_tokens) == (Deadlines().queue_ms, 0)


def test_the_command_tells_whom_it_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = "--rate 20 --duration-s 30 --policy static --decode 2 --ttft-ms 500 --admission slo --json"
    assert main([*load.split(), "--out", str(tmp_path / "x")]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["rejected"] == sum(row["rejected_for"].values()) > 0
    assert row["criterion"].startswith("TTFT within 500 ms + 48.83 ms per 1,000 prompt tokens")
    written = json.loads((tmp_path / "x.json").read_text())
    assert (written["summary"], written["arguments"]["admission"]) == (row, "slo")


def test_admission_is_as_in_a_configuration_unless_told() -> None:
    assert arguments([])[1].admission == AdmissionConfig().mode


# ------------------------------------------------------------ picture


@pytest.fixture(scope="module")
def axes(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Of the picture of a run that is far beyond its targets, refuses and has little room."""
    from matplotlib import pyplot as plt

    run = Cluster(SimSetup(TIMES, capacity=3), Static(1, 1), admission_for("slo", Targets(3000, 0, 40)))
    run.run(made_up(20.0, 120.0, 1000, 20, seed=1))
    kept: list[Any] = []
    criterion = Criterion(Targets(100, 0, 40))
    path = tmp_path_factory.mktemp("picture") / "x.png"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plt, "close", kept.append)
        draw(run, criterion, "title", path, summary(run, criterion), budget=4)
    (figure,) = kept
    figure.canvas.draw()
    plt.close(figure)
    return list(figure.axes)


def test_the_picture_names_everything(axes: list[Any]) -> None:
    load, workers, ttft, itl, cost = (
        [text.get_text() for text in axis.get_legend().get_texts()] for axis in axes
    )
    assert load == ["arrived", "of these rejected"]
    assert workers == ["prefill, ready", "prefill, target", "decode, ready", "decode, target"]
    assert "target: 100 ms" in ttft
    assert any(label.startswith("above: up to ") for label in ttft), "what does not fit is marked"
    assert "target: 40 ms" in itl
    assert cost == ["ordered or there", "budget: 4", "room in the cluster: 3"]
    assert "rejected)" in axes[0].get_title(loc="left")


def test_no_legend_covers_what_is_drawn(axes: list[Any]) -> None:
    for axis in axes:
        assert axis.get_legend().get_window_extent().y0 >= axis.get_window_extent().y1 - 1
