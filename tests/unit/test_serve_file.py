"""The Serve file around our settings: what Serve would pass over, or find out only when it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from serving.config_review import Level, review
from serving.errors import ConfigError
from serving.pool_capacity import Options
from serving.preflight import check_files, check_port, find_config, read_plan
from serving.yaml_file import load_yaml

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
        (
            {"proxy_location": "Headonly"},
            "proxy_location = 'Headonly'; allowed: Disabled, HeadOnly, EveryNode",
        ),
        (
            {"application": {"route_prefix": "llm"}},
            "applications[0].route_prefix = 'llm'; allowed: / or a path",
        ),
        ({"application": {"route_prefix": "/a/"}}, "applications[0].route_prefix = '/a/'; allowed"),
        ({"application": {"route_prefix": "/{a}"}}, "applications[0].route_prefix = '/{a}'; allowed"),
        ({"application": {"name": ""}}, "applications[0].name = ''; allowed: text"),
        ({"application": {"host": "x"}}, "applications[0].host: Serve takes it of all applications"),
    ],
    ids=[
        "top",
        "http",
        "application",
        "no guess",
        "no mapping",
        "proxy location",
        "prefix without a slash",
        "prefix with one too many",
        "prefix with braces",
        "name",
        "host",
    ],
)
def test_what_serve_would_pass_over_or_refuse_when_it_starts(
    tmp_path: Path, wrong: dict[str, Any], says: str
) -> None:
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
        (
            {"args": {"security": {"admin_key_file": "SHORT"}}},
            Level.ERROR,
            "security.admin_key_file",
            "has 5 bytes; allowed: at least 16",
        ),
        ({"args": {"link": {"key_file": "SHORT"}}}, Level.ERROR, "link.key_file", "has 5 bytes"),
        ({"args": {"security": {"api_keys_file": "SHORT"}}}, Level.ERROR, "security.api_keys_file", "16"),
    ],
    ids=[
        "right",
        "no application of ours",
        "nobody may scale",
        "the planner may",
        "budget",
        "keys",
        "link key",
        "a short admin key",
        "a short link key",
        "a short API key",
    ],
)
def test_check(
    *,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    written: dict[str, Any],
    level: Level | None,
    where: str,
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "SHORT").write_text("short")
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
            "'/no/times': no such file or directory; make one with python -m planner.profile",
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


def test_two_applications_need_two_names_and_two_prefixes(tmp_path: Path) -> None:
    path = write(tmp_path / "serve.yaml")
    document = yaml.safe_load(path.read_text())
    (ours,) = document["applications"]
    for other, says in (
        ({"name": "llm", "route_prefix": "/b"}, "applications[1].name = 'llm'"),
        ({"name": "b"}, "applications[1].route_prefix = '/'"),
    ):
        document["applications"] = [ours, {"import_path": "other:app", **other}]
        path.write_text(yaml.safe_dump(document))
        with pytest.raises(ConfigError) as caught:
            read_plan(path)
        assert says in caught.value.message
    document["applications"] = [ours, {"import_path": "other:app", "name": "b", "route_prefix": "/b"}]
    path.write_text(yaml.safe_dump(document))
    assert read_plan(path).route_prefix == ""


@pytest.mark.parametrize(
    ("written", "prefix"), [({}, ""), ({"route_prefix": "/"}, ""), ({"route_prefix": "/a/b"}, "/a/b")]
)
def test_the_prefix_of_our_paths(tmp_path: Path, written: dict[str, Any], prefix: str) -> None:
    assert read_plan(write(tmp_path / "serve.yaml", application=written)).route_prefix == prefix


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "applications: []\nhttp_options: {}\napplications: []\n",
            ":3: not YAML: the key applications stands",
        ),
        (
            "applications:\n- args:\n    a: 1\n    b: 2\n    a: 3\n",
            ":5: not YAML: the key a stands here twice",
        ),
    ],
    ids=["at the top", "deep inside"],
)
def test_a_key_that_stands_twice(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_plan(path)
    assert str(path) + says in caught.value.message


def test_merged_keys_may_be_overridden() -> None:
    text = "a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: [{<<: *a, x: 4}, {1: one, '1': text}]\n"
    assert load_yaml(text) == yaml.safe_load(text)


def test_a_directory_is_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a directory; give a configuration file"):
        find_config(str(tmp_path))
