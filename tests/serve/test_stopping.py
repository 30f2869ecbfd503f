"""Ctrl-C of `kvrelay serve` with answers in flight: each ends with a terminal event, nothing new begins."""

from __future__ import annotations

import http.client
import json
import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from serving.manifest import resolve_weights
from tests.serve.test_cli import STOP_S, family, free_port, serving

PREFIX = "/llm"
WEIGHTS = "smollm2-135m"


def config(directory: Path, port: int) -> Path:
    profile = {"step_ms": 20.0, "context_tokens": 8192, "kv_bytes_per_token": 64}
    engine = {"kind": "sim", "block_tokens": 16, "kv_bytes": 1 << 22, "profile": profile}
    pool = {"cpus": 0.1}
    variant = {"weights": WEIGHTS, "engine": engine, "prefill": pool, "decode": pool}
    application = {
        "name": "llm",
        "import_path": "serving.app:build",
        "route_prefix": PREFIX,
        "args": {"models": [{"name": "sim", "variants": [variant]}]},
    }
    path = directory / "serve.yaml"
    http_options = {"host": "127.0.0.1", "port": port}
    path.write_text(yaml.safe_dump({"http_options": http_options, "applications": [application]}))
    return path


@contextmanager
def asked(port: int, *, stream: bool, max_tokens: int) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {"model": "sim", "prompt": "x", "max_tokens": max_tokens, "ignore_eos": True, "stream": stream}
    head = {"content-type": "application/json"}
    connection.request("POST", f"{PREFIX}/v1/completions", json.dumps(body), head)
    with closing(connection), connection.getresponse() as response:
        yield response


class Asking(threading.Thread):
    """A request in a thread; `status`, `body` when it is over."""

    def __init__(self, port: int, **fields: Any) -> None:
        super().__init__(daemon=True)
        self._port, self._fields = port, fields
        self.streams = threading.Event()
        self.status, self.body = 0, b""
        self.start()

    def run(self) -> None:
        with asked(self._port, **self._fields) as response:
            self.status = response.status
            while piece := response.read1(65536):
                self.body += piece
                self.streams.set()


@pytest.mark.timeout(300)
def test_ctrl_c_ends_every_answer_with_a_terminal_event(tmp_path: Path) -> None:
    resolve_weights(WEIGHTS)
    port = free_port()
    with serving(config(tmp_path, port)) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        ready = process.stdout.readline()
        assert ready.startswith(f"Ready: http://127.0.0.1:{port}{PREFIX} "), ready
        *_, logs = [process.stdout.readline() for _ in range(3)]
        lines = [
            json.loads(line)
            for path in Path(logs.split(": ")[1].strip()).parent.glob("worker-*.err")
            for line in path.read_text().splitlines()
            if line.startswith("{")
        ]
        loaded = [line for line in lines if line["message"] == "ready"]
        assert sorted(line["role"] for line in loaded) == ["decode", "prefill"]
        assert all(line["blocks"] == 4096 and line["model"] == "sim" and line["ident"] for line in loaded)

        long = Asking(port, stream=True, max_tokens=6000)  # two minutes
        whole = Asking(port, stream=False, max_tokens=6000)
        short = Asking(port, stream=True, max_tokens=100)  # two seconds
        assert long.streams.wait(60)
        assert short.streams.wait(60)
        process.send_signal(signal.SIGINT)
        while "answers in flight" not in (said := process.stderr.readline()):
            assert said
        assert said == "Waiting up to 10 s for 3 answers in flight; Ctrl-C again stops now.\n"
        with asked(port, stream=True, max_tokens=1) as refused:
            assert (refused.status, refused.getheader("retry-after")) == (503, "1")
            assert json.load(refused)["error"]["code"] == "stopping"
        short.join(60)
        assert short.body.endswith(b"data: [DONE]\n\n")
        process.send_signal(signal.SIGTERM)
        long.join(60)
        whole.join(60)
        assert (long.status, whole.status) == (200, 503)
        assert b'"code":"stopping"' in long.body.rstrip().rpartition(b"\n\n")[2]
        assert json.loads(whole.body)["error"]["code"] == "stopping"
        assert process.wait(STOP_S) == 0
        assert family(process.pid) == []
