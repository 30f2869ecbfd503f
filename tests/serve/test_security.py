"""Keys and limits behind HAProxy: the same answers as at the frontend itself, and none of HAProxy's own."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from serving.local_cluster import LocalCluster
from tests.serve.client import TIMEOUT_S
from tests.serve.models.conftest import REAL, variant

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"
BODY_MS = 1500
SLOW = {"step_ms": 50, "kv_bytes_per_token": 64}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("security") / "keys"
    path.write_text(f"alice:{ALICE}\n")
    return path


@pytest.fixture(scope="module")
def url(keys: Path) -> Iterator[str]:
    sim = {"kind": "sim", "profile": SLOW, "kv_bytes": 1 << 20, "block_tokens": 16}
    args = {
        "models": [{"name": "sim", "variants": [variant(REAL, prefill=0, **sim)]}],
        "frontend": {"max_inflight_per_key": 2, "body_limit_bytes": 100_000},
        "deadlines": {"body_ms": BODY_MS},
        "security": {"api_keys_file": str(keys)},
        "health": {"canary_s": 1},
    }
    application = {"name": "llm", "route_prefix": "/", "import_path": "serving.app:build", "args": args}
    with LocalCluster(cpus=4) as cluster:
        cluster.serve({"proxy_location": "HeadOnly", "applications": [application]}, timeout_s=200)
        yield cluster.url


def ask(
    url: str, key: str | None = ALICE, headers: dict[str, str] | None = None, **fields: object
) -> httpx.Response:
    body = {"model": "sim", "prompt": "x", "max_tokens": 2, **fields}
    bearer = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.post(
        f"{url}/v1/completions", json=body, headers={**bearer, **(headers or {})}, timeout=TIMEOUT_S
    )


def raw(url: str, *pieces: bytes, pause_s: float = 0.0) -> bytes:
    """Status line of the answer to `pieces`. HAProxy keeps the connection whatever we say in it."""
    where = urlsplit(url)
    with socket.create_connection((where.hostname, where.port), timeout=30) as connection:
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(pause_s)
        answer = b""
        while b"}}" not in answer and (data := connection.recv(65536)):
            answer += data
        return answer


def test_a_key_is_needed(url: str) -> None:
    for key in (None, BOB):
        refused = ask(url, key)
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert refused.headers["www-authenticate"].startswith("Bearer")
    assert ask(url).status_code == 200
    assert httpx.get(f"{url}/health").status_code == 200
    assert httpx.get(f"{url}/metrics").status_code == 401
    scraped = httpx.get(f"{url}/metrics", headers={"authorization": f"Bearer {ALICE}"})
    assert "kvrelay_admission_rejects_total{frontend=" in scraped.text
    assert ALICE not in scraped.text


def test_the_request_id_is_said_once(url: str) -> None:
    for given in ({}, {"x-request-id": "abc"}):
        for path in ("/v1/completions", "/nothing"):
            response = httpx.post(
                url + path,
                json={"model": "sim", "prompt": "x", "max_tokens": 1},
                headers={"authorization": f"Bearer {ALICE}", **given},
                timeout=TIMEOUT_S,
            )
            (said,) = response.headers.get_list("x-request-id")
            assert said == given.get("x-request-id", said)


def test_a_new_key_counts_without_a_restart(url: str, keys: Path) -> None:
    keys.write_text(f"alice:{ALICE}\nbob:{BOB}\n")
    deadline = time.monotonic() + 20
    while ask(url, BOB).status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    keys.write_text("broken\n")
    time.sleep(1.5)  # longer than a look at the file takes to come
    assert (ask(url, BOB).status_code, ask(url).status_code) == (200, 200)


def test_one_key_cannot_take_all_places(url: str) -> None:
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: ask(url, max_tokens=20), range(6)))
    codes = sorted(answer.status_code for answer in answers)
    assert set(codes) == {200, 429}
    assert codes.count(200) >= 2
    assert all(int(a.headers["retry-after"]) >= 1 for a in answers if a.status_code == 429)
    assert ask(url).status_code == 200


def head(length: int, *more: str) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "host: x", f"authorization: Bearer {ALICE}",
             f"content-length: {length}", *more, "", ""]  # fmt: skip
    return "\r\n".join(lines).encode()


def test_a_slow_body_408_and_others_are_answered_meanwhile(url: str) -> None:
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(raw, url, head(1000), *[b" "] * 5, pause_s=0.1)
        assert ask(url).status_code == 200
        answer = slow.result()
    assert b" 408 " in answer.split(b"\r\n")[0], answer[:200]
    assert b"body_timeout" in answer
    assert BODY_MS / 1e3 - 0.2 < time.monotonic() - began < 20


def test_a_body_over_the_limit_413(url: str) -> None:
    body = json.dumps({"model": "sim", "prompt": "x" * 200_000}).encode()
    assert b" 413 " in raw(url, head(len(body)) + body).split(b"\r\n")[0]
    assert ask(url).status_code == 200


def test_an_idle_worker_asks_itself(url: str) -> None:
    deadline = time.monotonic() + 30
    while True:
        headers = {"authorization": f"Bearer {ALICE}"}
        lines = httpx.get(f"{url}/metrics", headers=headers).text.splitlines()
        counts = [line for line in lines if line.startswith("kvrelay_canary_seconds_count")]
        if counts and float(counts[0].split()[-1]) >= 2:
            break
        assert time.monotonic() < deadline, counts
        time.sleep(0.5)
    assert httpx.get(f"{url}/health").json() == {"status": "ok", "degraded": [], "ill": {}}
