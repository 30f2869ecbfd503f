"""`kvrelay capacity` as a person sees it: every shipped configuration, the screen, JSON, mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import configs
from serving.cli import main
from serving.pool_capacity import parse_shapes
from tests.unit.review_rig import trtllm, yaml_file
from tests.unit.test_footprint import SHAPES
from tests.unit.tiny_models import save_tiny_model

FOLDER = Path(configs.__file__).parent
SHIPPED = sorted(path.stem for path in FOLDER.glob("*.yaml"))
LLAMA_8B = str(SHAPES / "llama-3.1-8b.json")


@pytest.fixture(autouse=True)
def at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No model of this machine plays a part."""
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


ALL_SHAPES = [
    argument
    for name in ("llama-3.1-8b", "llama-3.1-70b", "smollm2-135m")
    for argument in ("--shape", f"{name}={SHAPES / name}.json")
]


def run(*arguments: str) -> int:
    return main(["capacity", *arguments])


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_configuration(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(name, *ALL_SHAPES) == 0
    screen = capsys.readouterr().out
    assert max(map(len, screen.splitlines())) <= 80
    assert "Holds" in screen
    assert "\n\n\n" not in screen
    assert run(name, *ALL_SHAPES, "--json") == 0
    pools = json.loads(capsys.readouterr().out)["pools"]
    assert all(pool["capacity"]["holds"] > 0 for pool in pools)


@pytest.mark.parametrize("name", SHIPPED)
def test_check_agrees(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", name, *ALL_SHAPES]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert ": ok; models: " in first or name == "trtllm-a100-8b"


BASELINE = """\
llama-3.1-8b/bf16: a decode worker on 1 x H100-80

  weights bfloat16, 8.03 G parameters
  KV bfloat16, 128.0 KiB a token, blocks of 32 tokens

  memory of each GPU                 GiB       %
    weights                         15.0    18.8
    KV cache                        52.4    65.8
    activations                      1.1     1.3   estimated
    transfer buffers                 2.0     2.5
    CUDA, graphs, NCCL               2.0     2.5   estimated
    left                             7.2     9.1
    card                            79.6   100.0

  KV cache of a worker
    blocks                        13,407
    tokens                       429,024

  sequences of 4,608 tokens (p99: 4,096 prompt + 512 answer)
    wanted                            76   a full batch
    KV has room for                   93
    with 20 % head-room               77
    max_batch                         76   <- binds
    KV in use                       82 %
    a decode step                11.6 ms   or more: bytes read over bandwidth

  Holds 76 sequences a worker, 76 in the pool of 1: max_batch binds.
"""


def test_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    """tests/unit/test_capacity.py has these numbers by hand."""
    assert run("trtllm-baseline-8b", "--shape", LLAMA_8B) == 0
    assert capsys.readouterr().out == BASELINE


VERDICTS: dict[str, tuple[list[str], int, str]] = {
    "as it is": ([], 0, "Holds 76 sequences a worker, 76 in the pool of 1: max_batch binds."),
    "enough": (
        ["--concurrency", "60"],
        0,
        "Holds 76 sequences a worker, 76 in the pool of 1: max_batch binds.",
    ),
    "too much": (
        ["--concurrency", "200"],
        0,
        "Holds 76 sequences a worker, 76 in the pool of 1: 200 need 3 workers.",
    ),
    "longer": (
        ["--prompt-tokens", "7000"],
        0,
        "Holds 47 sequences a worker, 47 in the pool of 1: KV memory binds, max_batch 76 is never reached.",
    ),
    "more head-room": (
        ["--headroom", "50"],
        0,
        "Holds 62 sequences a worker, 62 in the pool of 1: KV memory binds, max_batch 76 is never reached.",
    ),
    "beyond the context": (
        ["--prompt-tokens", "9000"],
        2,
        "Does not fit: a sequence of 9,512 tokens is beyond the context.",
    ),
    # 42,949,672,960 - 2 GiB - 16,060,522,496 - 1,151,721,472, 0.85 of it, over 724,775,731: 27.7
    "another GPU": (
        ["--gpu", "A100-40"],
        0,
        "Holds 27 sequences a worker, 27 in the pool of 1: KV memory binds",
    ),
    # 22.5 GiB less 2, 15 and 1.1: 3.7 of KV, and two buffers of 1 GiB on top
    "one that is too small": (["--gpu", "A10"], 2, "Does not fit: 1.3 GiB of each GPU are missing."),
}


@pytest.mark.parametrize(("arguments", "code", "said"), VERDICTS.values(), ids=VERDICTS)
def test_verdicts(arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("trtllm-baseline-8b", "--shape", LLAMA_8B, *arguments) == code
    out = " ".join(capsys.readouterr().out.split())
    assert said in out


def test_pools_that_are_laid_out_differently_are_both_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = trtllm(
        trtllm={"topology_pairs": ["tp2pp1>tp1pp1"]},
        prefill={"gpus": 2, "parallel": {"tensor": 2}},
        decode={"gpus": 1},
    )
    assert run(yaml_file(tmp_path / "s.yaml", args), "--gpu", "H200", "--shape", LLAMA_8B, "--json") == 0
    pools = json.loads(capsys.readouterr().out)["pools"]
    assert [(pool["role"], pool["gpus"]) for pool in pools] == [("decode", 1), ("prefill", 2)]
    decode, prefill = (pool["capacity"]["kv"]["token_bytes"] for pool in pools)
    assert (decode, prefill) == (131_072, 65_536)


def test_weights_of_this_machine_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By path, and in the cache of Hugging Face by the repository's name."""
    model = save_tiny_model(tmp_path / "model")
    args: dict[str, Any] = trtllm(weights=str(model), trtllm={"max_seq_len": 512})
    assert run(yaml_file(tmp_path / "s.yaml", args), "--gpu", "H200", "--json") == 0
    assert json.loads(capsys.readouterr().out)["pools"][0]["capacity"]["parameters"] > 0


MISTAKES: dict[str, tuple[list[str], str]] = {
    "no such file": (["nothing"], "nothing: no such file"),
    "no weights": (
        ["trtllm-baseline-8b"],
        "are not on this machine; give its config.json with --shape FILE",
    ),
    "no such GPU": (
        ["trtllm-baseline-8b", "--shape", LLAMA_8B, "--gpu", "V100"],
        "--gpu = 'V100': no such GPU",
    ),
    "no such shape": (["trtllm-baseline-8b", "--shape", "/none.json"], "/none.json: cannot be read"),
}


@pytest.mark.parametrize(("arguments", "said"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("kvrelay: ")
    assert captured.err.count("\n") == 1
    assert said in captured.err


BAD_OPTIONS = {
    "concurrency": (["--concurrency", "0"], "concurrency"),
    "text": (["--prompt-tokens", "many"], "prompt-tokens"),
    "headroom": (["--headroom", "-1"], "headroom"),
}


@pytest.mark.parametrize(("arguments", "said"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_a_bad_option(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run("trtllm-baseline-8b", *arguments)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_shapes_by_model() -> None:
    assert parse_shapes(["a.json", "m=b.json", "org/m=c.json"]) == {
        "": Path("a.json"),
        "m": Path("b.json"),
        "org/m": Path("c.json"),
    }
