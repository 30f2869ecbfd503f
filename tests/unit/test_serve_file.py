"""The Serve file around our settings: what Serve would pass over, or find out only when it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from serving.config_review import Level, review
from serving.errors import ConfigError
from serving.pool_capacity import Options
from serving.preflight import check_files, check_port, read_plan

ENGINE = {"kind": "sim", "profile": "zero", "kv_bytes": 1 << 22}


def write(path: Path, *, application: Any = None, args: Any = None, **top: Any) -> Path:
    ours = {"models": [{"name": "m", "variants": [{"weights": "w", "engine": ENGINE}]}], **(args or {})}
    whole = {"name": "llm", "import_path": "serving.app:build", "args": ours, **(application or {})}
    path.write_text(yaml.safe_dump({"applications": [whole], **top}))
    return path


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"http_option": {}}, "unknown key http_option; did you mean http_options? allowed here: proxy_l"),
        ({"http_options": {"hots": "x"}}, "unknown key http_options.hots; did you mean host?"),
        (
            {"application": {"external_scaler": True}},
            "unknown key applications[0].external_scaler; did you mean external_scaler_enabled?",
        ),
        ({"zzz": 1}, "unknown key zzz; allowed here"),
        ({"http_options": 3}, "http_options = 3; allowed: a mapping"),
    ],
    ids=["top", "http", "application", "no guess", "no mapping"],
)
def test_a_key_that_serve_would_pass_over(tmp_path: Path, wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_plan(write(tmp_path / "serve.yaml", **wrong))
    assert says in caught.value.message
    assert "\n" not in caught.value.message


ACT = {"planner": {"mode": "act"}}


@pytest.mark.parametrize(
    ("written", "level", "where", "says"),
    [
        ({}, None, "", ""),
        (
            {"application": {"import_path": "serving.app:biuld"}},
            Level.ERROR,
            "applications",
            "none is KVRelay's",
        ),
        ({"application": {"route_prefix": "llm"}}, Level.ERROR, "route_prefix", "slash"),
        ({"args": ACT}, Level.ERROR, "external_scaler_enabled", "Serve refuses"),
        ({"args": ACT, "application": {"external_scaler_enabled": True}}, None, "", ""),
        ({"args": {"planner": {"budget": {"cpus": 0.5}}}}, Level.ERROR, "planner.budget", "at least 2"),
        (
            {"args": {"security": {"api_keys_file": "/no/keys"}}},
            Level.NOTE,
            "security.api_keys_file",
            "/no/keys",
        ),
        ({"args": {"link": {"key_file": "/no/key"}}}, Level.NOTE, "link.key_file", "not on this machine"),
    ],
    ids=[
        "right",
        "no application of ours",
        "prefix",
        "nobody may scale",
        "the planner may",
        "budget",
        "keys",
        "link key",
    ],
)
def test_check(tmp_path: Path, written: dict[str, Any], level: Level | None, where: str, says: str) -> None:
    findings = [
        finding
        for finding in review(read_plan(write(tmp_path / "serve.yaml", **written)), Options())
        if not finding.where.startswith("m/main")
    ]
    if level is None:
        assert findings == []
        return
    (finding,) = findings
    assert (finding.level, finding.where) == (level, where)
    assert says in finding.problem
    assert finding.remedy


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"security": {"admin_key_file": "/no/key"}}, "security.admin_key_file = '/no/key': No such file"),
        ({"security": {"api_keys_file": "/no/keys"}}, "security.api_keys_file = '/no/keys'"),
        ({"link": {"key_file": "/no/key"}}, "link.key_file = '/no/key'"),
        (
            {
                "models": [
                    {"name": "m", "variants": [{"weights": "w", "times": "/no/times", "engine": ENGINE}]}
                ]
            },
            "'/no/times': no such file; make one with python -m planner.profile",
        ),
    ],
    ids=["admin key", "api keys", "link key", "times"],
)
def test_a_file_that_is_missing_is_told_before_anything_starts(
    tmp_path: Path, args: dict[str, Any], says: str
) -> None:
    plan = read_plan(write(tmp_path / "serve.yaml", args=args))
    with pytest.raises(ConfigError) as caught:
        check_files(plan)
    assert says in caught.value.message


def test_a_host_that_is_none() -> None:
    with pytest.raises(ConfigError, match=r"host 'no.such.host.invalid': no such address"):
        check_port("no.such.host.invalid", 8000)
