"""The `kvrelay` command as a person uses it: one line for every mistake, and nothing left behind."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from serving.local.environment import MARKER

ROOT = Path(__file__).parents[2]
STOP_S = 10.0


def command(*args: str | Path) -> list[str]:
    return [sys.executable, "-m", "serving.cli", *map(str, args)]


def run(*args: str | Path, timeout: float = 60, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*args),
        check=False,
        cwd=ROOT,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )


@contextmanager
def serving(config: Path, *args: str) -> Iterator[subprocess.Popen[str]]:
    """`kvrelay serve`, killed with all it started if the test fails half-way."""
    process = subprocess.Popen(
        command("serve", config, *args),
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(config.parent)},  # where the log of a killed one stays
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()  # its guard ends the rest
        process.communicate()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def tiny(path: Path, port: int, **args: Any) -> Path:
    application = {
        "name": "tiny",
        "import_path": "tests.serve.tiny_app:build",
        "route_prefix": "/",
        "args": args,
    }
    http_options = {"host": "127.0.0.1", "port": port}
    path.write_text(yaml.safe_dump({"http_options": http_options, "applications": [application]}))
    return path


def kvrelay(path: Path, **variant: Any) -> Path:
    args = {"models": [{"name": "m", "variants": [{"weights": "smollm2-135m", **variant}]}]}
    application = {"name": "llm", "import_path": "serving.app:build", "route_prefix": "/", "args": args}
    path.write_text(yaml.safe_dump({"applications": [application]}))
    return path


def family(owner: int) -> list[psutil.Process]:
    """Every living process that carries the marker of `kvrelay serve` number `owner`."""
    found = []
    for process in psutil.process_iter():
        try:
            marked = process.environ().get(MARKER, "").startswith(f"{owner}-")
            if marked and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def alive(processes: list[psutil.Process]) -> list[str]:
    return [
        f"{process.pid} {process.name()}"
        for process in processes
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]


def wait_gone(processes: list[psutil.Process], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while (left := alive(processes)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


# ---------------------------------------------------------------- a running one


def test_serves_until_ctrl_c_and_leaves_nothing(tmp_path: Path) -> None:
    port = free_port()
    config = tiny(tmp_path / "serve.yaml", port)
    with serving(config) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith(f"Ready: http://127.0.0.1:{port}"), line + process.communicate()[1]
        started = family(process.pid)
        directory = Path(started[0].environ()["RAY_AUTH_TOKEN_PATH"]).parent
        assert directory.is_dir()
        assert {"raylet", "haproxy"} <= {member.name() for member in started}

        stream = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        stream.request("GET", "/stream")
        answer = stream.getresponse()
        assert answer.read(6) == b"data: "

        second = run("serve", config)
        assert (second.returncode, second.stdout) == (1, "")
        assert f"port {port} is served by another `kvrelay serve` (pid {process.pid})" in second.stderr
        assert second.stderr.count("\n") == 1

        process.send_signal(signal.SIGINT)
        assert process.wait(STOP_S) == 0
        stream.close()
        assert alive(started) == []
        assert family(process.pid) == []
    assert not directory.exists()


def test_stops_in_the_middle_of_a_start_and_on_sigterm(tmp_path: Path) -> None:
    with serving(tiny(tmp_path / "serve.yaml", free_port())) as process:
        deadline = time.monotonic() + 30
        while len(started := family(process.pid)) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_S) == 0
        wait_gone([*started, *family(process.pid)], 1)


def test_a_killed_command_leaves_nothing_either(tmp_path: Path) -> None:
    with serving(tiny(tmp_path / "serve.yaml", free_port())) as process:
        deadline = time.monotonic() + 30
        while len(started := family(process.pid)) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.kill()
        process.wait()
        wait_gone(started, STOP_S)
        wait_gone(family(process.pid), STOP_S)


def test_an_application_that_fails_says_why_in_one_line(tmp_path: Path) -> None:
    result = run(
        "serve", tiny(tmp_path / "serve.yaml", free_port(), fail="the disk is on fire"), timeout=90
    )
    assert result.returncode == 1
    errors = [line for line in result.stderr.splitlines() if not line.startswith("[")]
    assert errors[0] == "kvrelay: RuntimeError: the disk is on fire"
    assert errors[1].startswith("log: ")
    log = Path(errors[1].removeprefix("log: "))
    assert "the disk is on fire" in log.read_text()
    log.unlink()


# ---------------------------------------------------------------- mistakes found before anything starts


def one_line(result: subprocess.CompletedProcess[str], code: int, *parts: str) -> None:
    assert result.returncode == code, result.stderr
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1, result.stderr
    for part in parts:
        assert part in result.stderr


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        one_line(
            run("serve", tiny(tmp_path / "serve.yaml", port)),
            1,
            f"port {port} is in use by",
            str(os.getpid()),
        )


def test_too_few_cpus(tmp_path: Path) -> None:
    config = kvrelay(tmp_path / "serve.yaml", prefill={"replicas": 3}, decode={"cpus": 2})
    one_line(
        run("serve", config, "--cpus", "4"),
        1,
        "need 5",
        "m/main prefill 3 x 1",
        "decode 1 x 2",
        "there are 4",
    )


def test_missing_weights(tmp_path: Path) -> None:
    config = kvrelay(
        tmp_path / "serve.yaml", weights="/no/such/model", prefill={"cpus": 0}, decode={"cpus": 0}
    )
    one_line(run("serve", config, "--port", str(free_port())), 1, "'/no/such/model'", "no such directory")


@pytest.mark.parametrize("verb", ["serve", "check"])
def test_a_bad_setting(tmp_path: Path, verb: str) -> None:
    config = kvrelay(tmp_path / "serve.yaml", engine={"kind": "vllm"})
    one_line(run(verb, config), 2, "engine.kind = 'vllm'; allowed: torch, sim, tensorrt_llm")


def test_no_such_file() -> None:
    one_line(run("serve", "nothing.yaml"), 2, "nothing.yaml: no such file", "quickstart")


# ---------------------------------------------------------------- the small commands


def test_check_names_what_it_found() -> None:
    result = run("check", "quickstart", "sim")
    assert (result.returncode, result.stderr) == (0, "")
    assert [line.split(": ")[1].split(";")[0] for line in result.stdout.splitlines()] == ["ok", "ok"]


def test_models_lists_the_default() -> None:
    assert "smollm2-135m" in run("models").stdout


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom serving.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'ray', 'torch', 'yaml', 'msgspec', 'psutil', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], check=False, cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert "kvrelay" in result.stdout
