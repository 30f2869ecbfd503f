"""What `kvrelay serve` says when it is ready: a command that works as it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from serving import cli
from serving.cli import _ready
from serving.config import load_config
from serving.preflight import Plan

LOGS = Path("/tmp/kvr/logs")


def ready(**args: Any) -> str:
    variant = {"weights": "w", "engine": {"kind": "sim", "profile": "zero", "kv_bytes": 1 << 22}}
    config = load_config({"models": [{"name": "m", "variants": [variant]}], **args})
    return _ready(Plan(Path("x.yaml"), {"applications": []}, (config,)), "http://h:1/llm", LOGS)


def test_ready_shows_a_request_that_is_repeatable_and_where_the_logs_are() -> None:
    said = ready()
    assert said.startswith("Ready: http://h:1/llm    (Ctrl-C stops it)")
    assert "curl -N http://h:1/llm/v1/chat/completions" in said
    assert '"temperature": 0' in said
    assert "authorization" not in said
    assert f"{LOGS}/worker-*.err" in said


def test_ready_shows_where_the_key_goes_and_not_the_key() -> None:
    said = ready(security={"api_keys_file": "/etc/keys"})
    assert "-H 'authorization: Bearer KEY'" in said
    assert "KEY: one of /etc/keys" in said


@pytest.mark.parametrize("cpus", ["-1", "x", "nan"])
def test_cpus_that_are_none(cpus: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "--cpus", cpus])
    assert ended.value.code == 2
    assert f"argument --cpus: {cpus!r}; allowed: a number, 0 or more" in capsys.readouterr().err
