"""`kvrelay admin` against a small local server: what it asks, every mistake, and its options."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serving import admin_command, cli
from tests.unit.admin_rig import DRAINING, EMPTY, KEY, LAST, TWO, Application, error, planner, worker


@pytest.fixture
def application() -> Iterator[Application]:
    served = Application({})
    served.thread.start()
    yield served
    served.server.shutdown()
    served.thread.join()
    served.server.server_close()


@pytest.fixture
def admin(application: Application, tmp_path: Path) -> Any:
    """Runs `kvrelay admin ...`; returns the exit code."""
    key = tmp_path / "admin.key"
    key.write_text(KEY + "\n")

    def run(*arguments: str, url: str = application.url, key_file: object = key) -> int:
        return cli.main(["admin", "--url", url, "--key-file", str(key_file), *arguments])

    return run


# ---------------------------------------------------------------- what is asked


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        (["workers"], ("GET", "/admin/workers", None)),
        (["drain", "1"], ("POST", "/admin/workers/d1/drain", None)),
        (["undrain", "d1"], ("POST", "/admin/workers/d1/undrain", None)),
        (["remove", "d1"], ("DELETE", "/admin/workers/d1", None)),
        (["weights", "org/chat", "a=90", "b=10"], ("PUT", "/admin/weights/org/chat", {"a": 90, "b": 10})),
        (["settings"], ("GET", "/admin/settings", None)),
        (["settings", "log_level=DEBUG"], ("PATCH", "/admin/settings", {"log_level": "DEBUG"})),
        (["planner"], ("GET", "/planner", None)),
        (
            ["planner", "mode=act", "budget=4", 'targets={"m": {"itl_ms": 30}}'],
            ("PATCH", "/planner", {"mode": "act", "budget": 4, "targets": {"m": {"itl_ms": 30}}}),
        ),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else "",
)
@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_a_verb_asks_its_route(
    *,
    admin: Any,
    application: Application,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    asked: tuple[str, str, Any],
    as_json: bool,
) -> None:
    told = planner() if "planner" in arguments else TWO if arguments == ["workers"] else worker("d1")
    application.routes = {("GET", "/admin/workers"): {"workers": [worker("d1")]}, asked[:2]: told}
    assert admin(*["--json"] * as_json, *arguments) == 0
    assert application.asked[-1] == asked
    out = capsys.readouterr().out
    if as_json:
        assert json.loads(out) == told
    elif arguments[0] != "settings":
        assert "{" not in out


# ---------------------------------------------------------------- drain --wait


@pytest.mark.parametrize(
    ("wait", "looks", "code", "says"),
    [
        ([], [TWO], 0, "d1: draining, 2 requests, 0 leases"),
        (
            ["--wait", "9"],
            [{"workers": [DRAINING]}, {"workers": [DRAINING]}, {"workers": [EMPTY]}],
            0,
            "safe to",
        ),
        (["--wait", "0.02"], [{"workers": [DRAINING]}], 1, "d1: draining, 2 requests"),
        (["--wait", "0.02"], [{"workers": [LAST]}], 1, "d1: draining, 0 requests, 0 leases; the last one"),
    ],
    ids=["told once", "until it is empty", "in vain", "the last"],
)
def test_drain(
    *,
    admin: Any,
    application: Application,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    wait: list[str],
    looks: list[dict[str, Any]],
    code: int,
    says: str,
) -> None:
    monkeypatch.setattr(admin_command, "POLL_S", 0.01)
    application.routes = {
        ("GET", "/admin/workers"): list(looks),
        ("POST", "/admin/workers/d1/drain"): DRAINING,
    }
    assert admin("drain", "d1", *wait) == code
    assert says in capsys.readouterr().out


def test_a_worker_that_leaves_while_it_is_drained(
    admin: Any, application: Application, capsys: pytest.CaptureFixture[str]
) -> None:
    application.routes = {
        ("GET", "/admin/workers"): [TWO, {"workers": []}],
        ("POST", "/admin/workers/d1/drain"): DRAINING,
    }
    assert admin("drain", "d1", "--wait", "9") == 1
    assert capsys.readouterr().err == "kvrelay: d1 left while it was drained\n"


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("arguments", "how", "code", "says"),
    [
        (["workers"], {"key_file": "/nowhere/key"}, 2, "--key-file = '/nowhere/key': No such file"),
        (["workers"], {"url": "host:8000"}, 2, "--url host:8000: allowed: http://HOST:PORT"),
        (["workers"], {"url": "http://127.0.0.1:1"}, 1, "does not answer: [Errno 111] Connection refused"),
        (["workers"], {"url": "http://127.0.0.1:x"}, 1, "does not answer"),
        (["drain", "zz"], {}, 2, "no worker is called 'zz'; there are: d1, p1"),
        (["drain", "1"], {}, 2, "several workers are called '1'"),
        (["weights", "chat", "main"], {}, 2, "'main': give VARIANT=WEIGHT"),
        (["weights", "chat", "main=x"], {}, 2, "main = 'x'; allowed: a number"),
        (["planner", "act"], {}, 2, "'act': give KEY=VALUE"),
        (["remove", "d1"], {}, 1, "400, d1 is not safe to remove"),
        (["weights", "chat", "x=1"], {}, 2, "400, weights: 'chat' has no variant 'x'"),
        (["weights", "x", "main=1"], {}, 2, "404, weights: there is no model 'x'"),
        (["weights", "x"], {}, 2, "there is no model 'x'; there are: chat"),
        (["settings"], {}, 1, "it has no admin routes: its configuration names no security.admin_key_file"),
        (["planner"], {}, 1, "502, Bad Gateway"),
        (["planner", "mode=act"], {}, 1, "is no KVRelay: it answered [1]"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line(
    *,
    admin: Any,
    application: Application,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    how: dict[str, Any],
    code: int,
    says: str,
) -> None:
    application.routes = {
        ("GET", "/admin/workers"): TWO,
        ("DELETE", "/admin/workers/d1"): (400, error("d1 is not safe to remove")),
        ("PUT", "/admin/weights/chat"): (400, error("weights: 'chat' has no variant 'x'")),
        ("PUT", "/admin/weights/x"): (404, error("weights: there is no model 'x'")),
        ("GET", "/admin/weights"): {"chat": {"main": 1.0}},
        ("GET", "/planner"): (502, b"<html>"),
        ("PATCH", "/planner"): (200, b"[1]"),
    }
    assert admin(*arguments, **how) == code
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith("kvrelay: ")
    assert says in said.err


def test_a_wrong_key_is_named_by_its_file(
    admin: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "wrong.key"
    wrong.write_text("x" * 32)
    assert admin("workers", key_file=wrong) == 1
    said = capsys.readouterr().err
    assert f"the key in {wrong} is not the one" in said
    assert "x" * 32 not in said


# ---------------------------------------------------------------- ways to say it


def test_json_may_stand_after_the_verb(
    admin: Any, application: Application, capsys: pytest.CaptureFixture[str]
) -> None:
    application.routes = {("GET", "/admin/workers"): TWO}
    for arguments in (["--json", "workers"], ["workers", "--json"]):
        assert admin(*arguments) == 0
        assert json.loads(capsys.readouterr().out) == TWO


def test_the_key_file_may_be_named_by_the_environment(
    application: Application, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    application.routes = {("GET", "/admin/workers"): TWO}
    monkeypatch.delenv("KVRELAY_ADMIN_KEY_FILE", raising=False)
    with pytest.raises(SystemExit) as ended:
        cli.main(["admin", "--url", application.url, "workers"])
    assert ended.value.code == 2
    key = tmp_path / "key"
    key.write_text(KEY)
    monkeypatch.setenv("KVRELAY_ADMIN_KEY_FILE", str(key))
    assert cli.main(["admin", "--url", application.url, "workers"]) == 0
    (tmp_path / "wrong").write_text("x" * 32)
    wrong = ["--key-file", str(tmp_path / "wrong")]
    assert cli.main(["admin", "--url", application.url, *wrong, "workers"]) == 1  # what is given wins


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ([], "chat: main 75 %, canary 25 %\nother: main 100 %\n"),
        (["chat"], "chat: main 75 %, canary 25 %\n"),
    ],
    ids=["all", "one"],
)
def test_weights_without_shares_shows_them(
    *,
    admin: Any,
    application: Application,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    shown: str,
) -> None:
    shares = {"chat": {"main": 3.0, "canary": 1.0}, "other": {"main": 1.0}}
    application.routes = {("GET", "/admin/weights"): shares}
    assert admin("weights", *arguments) == 0
    assert capsys.readouterr().out == shown
    assert admin("weights", *arguments, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {m: shares[m] for m in arguments or shares}
