"""`python -m serving.local.leave`: what it ends, and what it must not touch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from serving.local import leave
from serving.local.environment import MARKER

Start = Callable[..., psutil.Process]


@pytest.fixture
def ray_start(tmp_path: Path) -> Iterator[Start]:
    """Starts a process that looks like `ray start --block` and ends on SIGTERM, as that does."""
    script = tmp_path / "ray"
    script.write_text("import sys, time\nprint('up', flush=True)\ntime.sleep(60)\n")
    started: list[subprocess.Popen[bytes]] = []

    def start(**env: str) -> psutil.Process:
        child = subprocess.Popen(
            [sys.executable, str(script), "start", "--block"], env=os.environ | env, stdout=subprocess.PIPE
        )
        started.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        return psutil.Process(child.pid)

    yield start
    for child in started:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["--halp"], 2),
        (["now"], 2),
        (["--pid", "x"], 2),
        (["--all", "--pid", "1"], 2),
    ],
    ids=["help", "unknown", "too many", "no pid", "both"],
)
def test_arguments_end_nothing(
    ray_start: Start, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int
) -> None:
    node = ray_start()
    monkeypatch.setattr(leave, "ray_start", lambda: [node])  # of this machine's others it must not know
    with pytest.raises(SystemExit) as ended:
        leave.main(arguments)
    assert ended.value.code == code
    assert node.is_running()
    assert node.status() != psutil.STATUS_ZOMBIE


def test_it_ends_the_one_it_is_told_and_says_so(
    ray_start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = ray_start(), ray_start()
    assert {one, other} <= set(leave.ray_start())
    assert leave.main(["--pid", str(one.pid)]) == 0
    assert f"draining pid {one.pid}: " in capsys.readouterr().out
    assert not one.is_running() or one.status() == psutil.STATUS_ZOMBIE
    assert other.status() != psutil.STATUS_ZOMBIE


def test_a_cluster_of_kvrelay_serve_is_passed_over(
    ray_start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = ray_start(**{MARKER: "1-abc"})
    assert theirs not in leave.ray_start()
    assert leave.main(["--pid", str(theirs.pid)]) == 1
    assert f"pid {theirs.pid} is no `ray start --block` that this may end" in capsys.readouterr().err
    assert theirs.status() != psutil.STATUS_ZOMBIE


def test_several_are_ended_only_when_all_are_meant(
    ray_start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [ray_start(), ray_start()]
    monkeypatch.setattr(leave, "ray_start", lambda: nodes)  # of this machine's others it must not know
    assert leave.main([]) == 1
    said = capsys.readouterr().err
    assert "2 Rays run here" in said
    assert "--pid, or --all" in said
    assert all(node.status() != psutil.STATUS_ZOMBIE for node in nodes)
    assert leave.main(["--all"]) == 0
    assert not any(node.is_running() and node.status() != psutil.STATUS_ZOMBIE for node in nodes)


def test_the_only_one_needs_no_argument_as_in_a_pod(
    ray_start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = ray_start()
    monkeypatch.setattr(leave, "ray_start", lambda: [node])
    assert leave.main([]) == 0
    assert not node.is_running() or node.status() == psutil.STATUS_ZOMBIE


def test_nothing_to_leave(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(leave, "ray_start", list)
    assert leave.main([]) == 1
    assert capsys.readouterr().err == "no `ray start --block` runs here\n"
