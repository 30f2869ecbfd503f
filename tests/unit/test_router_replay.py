"""benchmarks.router_replay over a made-up trace: every policy ends, and the numbers are what they say."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from benchmarks.router_replay import REPLAYED, Replay, Setup, main, replay
from benchmarks.traces import TraceRequest, load_trace

KEYS = {"hit", "mean_ttft_s", "p50_ttft_s", "p90_ttft_s", "p99_ttft_s", "slo", "mean_tpot_ms"}


def families(n: int = 120, shared: int = 8, own: int = 2, kinds: int = 7) -> list[TraceRequest]:
    """`kinds` prefixes of `shared` blocks, `own` blocks of each request's own, 10 requests a second."""
    return [
        TraceRequest(
            arrival_s=i * 0.1,
            prompt_tokens=512 * (shared + own),
            output_tokens=20,
            hashes=(
                *(1000 * (i % kinds) + j for j in range(shared)),
                *(1_000_000 + 10 * i + j for j in range(own)),
            ),
        )
        for i in range(n)
    ]


@pytest.mark.parametrize("policy", REPLAYED)
def test_every_policy_ends(policy: str) -> None:
    row = replay(families(), policy, Setup(workers=3, blocks=200))
    assert set(row) == KEYS
    assert row["mean_tpot_ms"] == pytest.approx(30.0)
    assert 0 < row["p50_ttft_s"] <= row["p90_ttft_s"] <= row["p99_ttft_s"]


def test_one_cold_request_takes_its_own_time() -> None:
    row = replay(families(1), "ttft_regret", Setup(workers=2, blocks=200))
    assert row["hit"] == 0
    assert row["mean_ttft_s"] == pytest.approx(5120 / 20_480, abs=1e-3)


@pytest.mark.parametrize(("packed", "second_s"), [(False, 0.075), (True, 0.1)])
def test_packed_slices_end_later_for_who_ends_in_them(packed: bool, second_s: float) -> None:
    """1024 tokens, which are a slice, then 512 and 5120 on the same worker. The last gets done the same."""
    requests = [
        TraceRequest(0.0, 512 * n, 1, tuple(range(1000 * n, 1000 * n + n)))  # nothing in common
        for n in (2, 1, 10)
    ]
    run = Replay("ttft_regret", Setup(workers=1, blocks=200, packed=packed))
    run.run(requests)
    assert [job.first_token_s for job in run.jobs] == pytest.approx([0.05, second_s, 6656 / 20_480])


def test_hits_are_found() -> None:
    """Seven prefixes of 8 blocks in 10: all but the first of each kind hit 80 %."""
    row = replay(families(), "ttft_regret", Setup(workers=3, blocks=400))
    assert row["hit"] == pytest.approx(0.8 * 113 / 120, abs=0.03)
    assert (
        row["mean_ttft_s"] < replay(families(), "round_robin", Setup(workers=3, blocks=400))["mean_ttft_s"]
    )


@pytest.mark.parametrize("separate", [False, True], ids=["together", "separate"])
def test_several_frontends_and_load_dependent_decode(separate: bool) -> None:
    setup = Setup(workers=3, blocks=200, separate=separate, fixed_decode=False, frontends=3)
    row = replay(families(), "ttft_regret", setup)
    assert 12 < row["mean_tpot_ms"] < 20


def test_trace_files_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"timestamp": 3000 * i, "input_length": 1000, "output_length": 10, "hash_ids": [0, i + 1]}
        for i in range(8)
    ]
    with gzip.open(tmp_path / "mooncake_conversation.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    assert [r.arrival_s for r in load_trace("conversation", tmp_path, speed=3.0, limit=2)] == [0.0, 1.0]
    assert main(["--json", "--traces", str(tmp_path), "--policy", "all", "--workers", "2"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["policies"]) == set(REPLAYED)
    assert all(set(row) == KEYS for row in report["policies"].values())


def test_missing_traces_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--traces", str(tmp_path / "nowhere")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert main(["--traces", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
