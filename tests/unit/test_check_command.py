"""`kvrelay check` as a person sees it: exit codes, the screen, JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serving.check_command import WRONG, run
from tests.unit.review_mistakes import MISTAKES
from tests.unit.review_rig import LLAMA_8B, found, trtllm, yaml_file


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Errors 2; warnings and notes 0."""
    right = yaml_file(tmp_path / "right.yaml", trtllm())
    warned = yaml_file(tmp_path / "warned.yaml", trtllm(trtllm={"free_gpu_memory_fraction": 0.97}))
    wrong = yaml_file(tmp_path / "wrong.yaml", trtllm(parallel={"tensor": 3}))
    assert run([right], LLAMA_8B, as_json=False) == 0
    assert capsys.readouterr().out == f"{right}: ok; models: m; 2 CPUs, 2 GPUs\n"
    assert run([right, warned], LLAMA_8B, as_json=False) == 0
    assert f"{warned}: 1 warning; models: m" in capsys.readouterr().out
    assert run([wrong, right], LLAMA_8B, as_json=False) == WRONG
    said = capsys.readouterr().out
    assert f"{wrong}: 1 error" in said
    assert f"{right}: ok" in said
    assert run([str(tmp_path / "none.yaml")], LLAMA_8B, as_json=False) == WRONG
    assert "none.yaml: no such file" in capsys.readouterr().err


@pytest.mark.parametrize("name", MISTAKES)
def test_the_screen_has_80_columns(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args, options, *_ = MISTAKES[name]
    monkeypatch.chdir(tmp_path)
    yaml_file(Path("s.yaml"), args)
    run(["s.yaml"], options, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("->" in line for line in lines) == len(found(args, options))


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = yaml_file(tmp_path / "wrong.yaml", trtllm(parallel={"tensor": 3}))
    assert run([wrong, "nothing"], LLAMA_8B, as_json=True) == WRONG
    first, second = json.loads(capsys.readouterr().out)["configs"]
    assert (first["config"], first["verdict"], first["gpus"]) == (wrong, "1 error, 1 warning", 6)
    assert first["findings"][0]["level"] == "error"
    assert first["findings"][0]["remedy"] == "one of 1, 2, 4, 8"
    assert "no such file" in second["findings"][0]["problem"]
