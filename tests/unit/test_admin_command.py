"""`kvrelay admin` against a small local server: what it asks, what a person sees, every mistake."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from serving import admin_command, cli
from serving.admin_tables import WIDTH, planner_summary, table, workers_table

KEY = "an-admin-key-of-32-characters-xx"


class Application:
    """Answers `routes` ((method, path) -> status, body; a list is answered one after another, the last one
    for good) to whoever has the key, and keeps what was asked."""

    def __init__(self, routes: dict[tuple[str, str], Any]) -> None:
        self.routes = routes
        self.asked: list[tuple[str, str, Any]] = []
        application = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                application.asked.append((self.command, self.path, json.loads(body) if body else None))
                status, told = application.told(self.command, self.path, self.headers["authorization"])
                raw = told if isinstance(told, bytes) else json.dumps(told).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer

            def log_message(self, format: str, *arguments: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})

    def told(self, method: str, path: str, authorization: str) -> tuple[int, Any]:
        if authorization != f"Bearer {KEY}":
            return 401, error("this path wants the admin key as a bearer token")
        answer = self.routes.get((method, path), (404, error("there is nothing at this path")))
        if isinstance(answer, list):
            answer = answer.pop(0) if len(answer) > 1 else answer[0]
        return answer if isinstance(answer, tuple) else (200, answer)


def error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "x", "param": None, "code": None}}


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


def worker(ident: str, pool: str = "decode", **more: Any) -> dict[str, Any]:
    return {
        "worker": ident,
        "model": "chat",
        "variant": "main",
        "pool": pool,
        "role": pool,
        "ordered_to_drain": False,
        "draining": False,
        "requests": 0,
        "leases": 0,
        "free_blocks": 4096,
        "reported": True,
        "safe_to_remove": False,
        **more,
    }


DRAINING = worker("d1", draining=True, ordered_to_drain=True, requests=2)
EMPTY = worker("d1", draining=True, ordered_to_drain=True, safe_to_remove=True)
TWO = {"workers": [worker("d1"), worker("p1", "prefill")]}


def variant(prefill: int, decode: int, lent: int = 0, reason: str = "as needed") -> dict[str, Any]:
    return {
        "prefill": prefill,
        "decode": decode,
        "lent": lent,
        "reason": reason,
        "wanted": [prefill, decode],
        "forecast_rps": 2.5,
        "reachable": None,
    }


def pool(ready: int = 0, **more: int) -> dict[str, int]:
    return {"ready": ready, "lent": 0, "starting": 0, "draining": 0, **more}


def planner(**more: Any) -> dict[str, Any]:
    seen = {
        "window_s": 2.0,
        "arrivals": 6,
        "queued": 1,
        "decoding": None,
        "pools": {"prefill": pool(1), "decode": pool(2, starting=1)},
    }
    return {
        "mode": "act",
        "trouble": None,
        "budget": 8.0,
        "budget_unit": "GPUs",
        "targets": {
            "chat/main": {"ttft_ms": 800, "ttft_ms_per_1k_tokens": 50, "itl_ms": 40, "percentile": 95}
        },
        "startup_s": {"chat/main": 23.4},
        "flip_s": {"chat/main": 2.1},
        "observation": {"variants": {"chat/main": seen}, "frontends": 1, "inflight": 3},
        "decision": {"variants": {"chat/main": variant(1, 4)}, "frontends": None, "reason": "x"},
        "reason": "x",
        "history": [
            {"at_s": 1000.0 + tick, "mode": "act", "variants": {"chat/main": one}}
            for tick, one in enumerate(
                [variant(1, 2), variant(1, 2), variant(1, 3, reason="up"), variant(2, 3)]
            )
        ],
        **more,
    }


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
    ],
    ids=["told once", "until it is empty", "in vain"],
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


# ---------------------------------------------------------------- what a person sees


def test_numbers_stand_right_and_unknown_is_a_dash() -> None:
    assert table([["a", "n"], ["bb", 1000], ["c", None]], left=1) == "a      n\nbb  1000\nc      -"


@pytest.mark.parametrize(
    ("told", "state"),
    [
        (worker("w"), "serving"),
        (worker("w", role="prefill"), "plays prefill"),
        (worker("w", ordered_to_drain=True), "draining"),
        (worker("w", draining=True), "draining"),
        (EMPTY, "safe to remove"),
        (worker("w", reported=False), "silent"),
        (
            {**{k: worker("w")[k] for k in ("worker", "model", "variant", "pool")}, "reported": False,
             "ordered_to_drain": False, "safe_to_remove": False},
            "silent",
        ),
    ],
    ids=["serving", "lent", "ordered", "draining", "empty", "silent", "never reported"],
)  # fmt: skip
def test_a_worker_is_one_line(told: dict[str, Any], state: str) -> None:
    heading, line = workers_table({"workers": [told]}).splitlines()
    assert heading.split()[:4] == ["worker", "variant", "pool", "state"]
    assert f"chat/main  decode  {state}" in line


def test_workers_stand_by_variant_then_prefill_first() -> None:
    there = [worker("b"), worker("a"), worker("z", "prefill"), worker("c", "prefill", variant="canary")]
    lines = workers_table({"workers": there}).splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["c", "z", "a", "b"]
    assert workers_table({"workers": []}) == "no worker is linked"


def test_the_planner_as_a_person_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "localtime", time.gmtime)
    assert planner_summary(planner()) == (
        """\
mode    act: scales the pools
budget  8 GPUs

variant    pool     ready  starting  lent  leaving  wanted
chat/main  prefill      1         0     0        0       1
chat/main  decode       2         1     0        0       4
frontends               1         -     -        -       1

chat/main
  targets  TTFT 800 ms + 50 a 1,000 tokens, ITL 40 ms, p95
  load     3 requests/s (expected 2.5), 1 wait, ? decode
  start    23.4 s until a worker is ready
  flip     2.1 s until a worker plays its other role
  reason   as needed

last changes
  00:16:43  chat/main prefill 1 -> 2: as needed
  00:16:42  chat/main decode 2 -> 3: up"""
    )


LONG = "hold: " + "because of something that takes many words to say " * 5


def test_a_planner_that_is_off_shows_nothing_of_some_time_ago() -> None:
    lines = planner_summary(planner(mode="off", budget=1.0, history=[])).splitlines()
    assert lines == [
        "mode    off: decides nothing; `planner mode=advise` or `mode=act` starts it",
        "budget  1 GPU",
        "",
        "chat/main",
        "  targets  TTFT 800 ms + 50 a 1,000 tokens, ITL 40 ms, p95",
        "  start    23.4 s until a worker is ready",
        "  flip     2.1 s until a worker plays its other role",
    ]


@pytest.mark.parametrize(
    ("told", "says"),
    [
        (planner(mode="off", observation=None, decision=None, history=[], startup_s={}),
         "`planner mode=advise`"),
        (planner(observation=None, decision=None, history=[]), "no decision yet"),
        (planner(trouble="Serve did not answer"), "holds   Serve did not answer"),
        (planner(decision={"variants": {"chat/main": variant(1, 3, 1)}, "frontends": 2, "reason": ""}),
         "1 of decode shall play prefill"),
        (planner(decision={"variants": {"chat/main": variant(1, 3, -2)}, "frontends": 2, "reason": ""}),
         "2 of prefill shall play decode"),
        (planner(decision={"variants": {"chat/main": {**variant(1, 3), "reachable": "ITL 62 ms"}},
                           "frontends": 2, "reason": ""}),
         "no number of workers can meet the targets: ITL 62 ms"),
        (planner(decision={"variants": {"chat/main": variant(1, 3, reason=LONG)}, "frontends": 2,
                           "reason": ""}),
         "\n           "),
        (planner(history=[{"at_s": tick, "mode": "advise", "variants": {"chat/main": variant(1, tick)}}
                          for tick in range(1, 30)]),
         "decode 28 -> 29 (advise only)"),
    ],
    ids=["off", "before the first tick", "trouble", "lent", "lent the other way", "out of reach", "long",
         "many changes"],
)  # fmt: skip
def test_the_planner_in_other_states(told: dict[str, Any], says: str) -> None:
    lines = planner_summary(told)
    assert says in lines
    assert all(len(line) <= WIDTH for line in lines.splitlines())
    assert lines.count("->") <= 8
