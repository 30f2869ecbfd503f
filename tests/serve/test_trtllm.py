"""`engine.kind: tensorrt_llm` under Ray, on the fake package: a change of the configuration and no more.

The fake is on PYTHONPATH of the cluster's processes; what is served finds it as it would the real one. The
workers are processes of their own, so all that passes between them is the state in the hand-off.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from serving.local_cluster import LocalCluster
from tests.serve.client import Client
from tests.serve.metrics import Scrape
from tests.tiny_tokenizer import END, save_tiny_tokenizer, tiny_tokenizer
from tests.unit.app_rig import PLAIN, prompt
from tests.unit.trtllm_rig import save_model

ROOT = Path(__file__).parents[2]
FAKE = ROOT / "tests" / "fake_trtllm" / "path"
MODELS = ("split", "whole")  # the same weights, with and without prefill workers
N_TOKENS = 100
DEADLINE_S = 30.0


def application(weights: Path) -> dict[str, Any]:
    def model(name: str, prefill: int, decode: int) -> dict[str, Any]:
        pool = {"min_replicas": 0, "cpus": 0.1, "gpus": 1}
        engine = {"kind": "tensorrt_llm", "block_tokens": 8, "trtllm": {"transfer_timeout_ms": 500}}
        variant = {
            "weights": str(weights),
            "engine": engine,
            "prefill": {**pool, "replicas": prefill},
            "decode": {**pool, "replicas": decode},
        }
        return {"name": name, "variants": [variant]}

    return {
        "proxy_location": "HeadOnly",
        "logging_config": {"enable_access_log": False},
        "applications": [
            {
                "name": "llm",
                "route_prefix": "/",
                "import_path": "serving.app:build",
                "external_scaler_enabled": True,
                "args": {
                    "models": [model("split", 1, 2), model("whole", 0, 1)],
                    "router": {"local_prefill": False},
                },
            }
        ],
    }


@pytest.fixture(scope="module")
def trtllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    directory = tmp_path_factory.mktemp("trtllm")
    end = tiny_tokenizer().id_of(END)
    assert end is not None
    save_model(directory, eos=end, token_ids=PLAIN, step_ms=5)
    save_tiny_tokenizer(directory)
    env = {"PYTHONPATH": f"{ROOT}{os.pathsep}{FAKE}", "FAKE_TRTLLM_PROFILE": "main"}
    with LocalCluster(cpus=4, gpus=4, env=env) as cluster:
        cluster.serve(application(directory), timeout_s=200)
        yield cluster


def test_equal_answers_a_death_and_what_was_cached(trtllm: LocalCluster) -> None:
    client = Client(trtllm.url)
    scrape = Scrape(client)
    asked: list[dict[str, Any]] = [
        {"prompt": prompt(n, salt=n), "max_tokens": 30, "temperature": 0} for n in (1, 8, 64, 65, 500)
    ]

    def answers(model: str) -> list[str]:
        with ThreadPoolExecutor(5) as pool:
            found = pool.map(lambda fields: client.complete(model, **fields), asked)
            return [answer["choices"][0]["text"] for answer in found]

    right = answers("whole")
    assert len(set(right)) == len(asked)
    assert answers("split") == right
    assert scrape.total("kvrelay_prompt_tokens_computed_total", model="split", pool="decode") == 0
    assert scrape.total("kvrelay_prompt_tokens_computed_total", model="split", pool="prefill") > 500

    # A second turn finds the first one's blocks: the engine's events became the router's index.
    turn = client.complete("split", prompt(500, salt=500) + prompt(40, salt=9), max_tokens=4)
    assert turn["usage"]["prompt_tokens_details"]["cached_tokens"] >= 480

    # One decode worker is killed in mid-stream; the client notices nothing.
    long = {"prompt": prompt(60), "max_tokens": N_TOKENS, "temperature": 0}
    undisturbed = client.complete("split", **long)["choices"][0]["text"]
    text: list[str] = []
    body = {"model": "split", "stream": True, **long}
    with httpx.stream("POST", f"{trtllm.url}/v1/completions", json=body, timeout=DEADLINE_S) as reply:
        assert reply.status_code == 200
        home = reply.headers["x-kvrelay-decode"]
        for n, line in enumerate(line for line in reply.iter_lines() if line.startswith("data: {")):
            text.append(line)
            if n == 10:
                worker_process(trtllm, home).send_signal(signal.SIGKILL)
    said = "".join(piece["choices"][0]["text"] for piece in map(parsed, text) if piece["choices"])
    assert said == undisturbed
    assert scrape.total("kvrelay_resumes_total", model="split") >= 1


def parsed(line: str) -> dict[str, Any]:
    piece: dict[str, Any] = json.loads(line[6:])
    assert "error" not in piece, piece
    return piece


def worker_process(cluster: LocalCluster, ident: str) -> psutil.Process:
    """The replica's process: Serve names its log file by the replica's id."""
    for process in cluster.processes():
        with suppress(psutil.Error):
            if any(ident in file.path for file in process.open_files()):
                return process
    raise AssertionError(f"no process of {ident}")
