"""The whole application under Ray, HAProxy and NIXL: streams, cancels, metrics, mistakes."""

from __future__ import annotations

import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from benchmarks.sse_client import request_bytes
from serving.local_cluster import LocalCluster
from tests.serve.client import Client
from tests.serve.metrics import Scrape
from tests.serve.models.conftest import AGGREGATED, REAL

CHAT = "/v1/chat/completions"


def test_the_official_client_streams_a_real_answer(client: Client) -> None:
    """sdk_reads_stream, natural_stop_reported"""
    sdk = openai.OpenAI(base_url=client.url + "/v1", api_key="none", timeout=120)
    with sdk:
        stream = sdk.chat.completions.create(
            model=REAL,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            max_tokens=40,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert "Paris" in text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens_details is not None


def test_prefill_and_decode_are_different_processes(client: Client, scrape: Scrape) -> None:
    before = scrape.total("kvrelay_handoff_bytes_total", model="sim", pool="decode")
    client.chat("sim", "hand this over", max_tokens=8)
    after = scrape.total("kvrelay_handoff_bytes_total", model="sim", pool="decode")
    assert after > before
    assert scrape.total("kvrelay_tokens_generated_total", model="sim", pool="prefill") >= 1
    assert scrape.total("kvrelay_kv_content_checks_total", model="sim", pool="decode") > 0
    assert scrape.total("kvrelay_kv_content_errors_total") == 0


def test_replicas_are_no_nicer_than_what_starts_beside_them(cluster: LocalCluster) -> None:
    """Ray would have them at niceness 15: on a busy machine whatever starts takes their time."""
    replicas = [p for p in cluster.processes() if "ray::ServeReplica" in " ".join(p.cmdline())]
    assert replicas
    assert {process.nice() for process in replicas} == {0}


def test_usage_tells_the_prefix_hit(client: Client) -> None:
    """repeat_prompt_hits, cached_within_prompt: the prefill's hit, not what was moved."""
    text = "A prompt that is asked twice. " * 12
    cold = client.chat(REAL, text, max_tokens=4, temperature=0)["usage"]
    warm = client.chat(REAL, text, max_tokens=4, temperature=0)["usage"]
    cached = warm["prompt_tokens_details"]["cached_tokens"]
    assert cold["prompt_tokens"] == warm["prompt_tokens"]
    assert 0 < cached <= warm["prompt_tokens"]
    assert cached > cold["prompt_tokens_details"]["cached_tokens"]


def test_salt_isolates(client: Client) -> None:
    text = "A prompt with a salt. " * 20

    def cached(salt: str) -> int:
        usage = client.chat(REAL, text, max_tokens=2, cache_salt=salt)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached("a"), cached("a") > 0, cached("b")] == [0, True, 0]


@pytest.mark.parametrize("model", [REAL, REAL + AGGREGATED])
def test_seeded_samples_repeat_in_any_company(client: Client, model: str) -> None:
    """seed_repeats, seed_among_unseeded, no_seed_varies"""

    def ask(seed: int | None) -> str:
        fields: dict[str, Any] = {} if seed is None else {"seed": seed}
        answer = client.chat(model, "Tell me a story.", max_tokens=12, temperature=1.0, **fields)
        return str(answer["choices"][0]["message"]["content"])

    alone = ask(42)
    with ThreadPoolExecutor(8) as pool:
        crowd = list(pool.map(ask, [42, None, None, 42, None, None]))
    assert [crowd[0], crowd[3]] == [alone, alone]
    assert len({crowd[n] for n in (1, 2, 4, 5)}) > 1


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"{", 400, None),
        ({"model": "sim", "messages": "hello"}, 400, "messages"),
        ({"model": "sim", "messages": [{"role": "user", "content": "x"}], "n": 3}, 400, "n"),
        (
            {"model": "sim", "messages": [{"role": "user", "content": "x"}], "temperature": 9},
            400,
            "temperature",
        ),
        (
            {"model": "sim", "messages": [{"role": "user", "content": "x"}], "frequency_penalty": 1},
            400,
            "frequency_penalty",
        ),
        ({"model": "nobody", "messages": [{"role": "user", "content": "x"}]}, 404, "model"),
        ({"model": "sim", "messages": [{"role": "user", "content": "x " * 9000}]}, 400, "messages"),
        (b"x" * (17 << 20), 413, None),
    ],
    ids=["json", "type", "n", "range", "engine-cannot", "model", "context", "body"],
)
def test_mistakes_are_one_error_shape(client: Client, body: Any, status: int, param: str | None) -> None:
    response = client.post(CHAT, body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert len(response.content) < 4096


def test_context_overflow_no_garbage(client: Client) -> None:
    known = client.complete(REAL, "The sky is", max_tokens=6, temperature=0)["choices"][0]["text"]
    for factor in (1.05, 1.5, 4):
        response = client.post(
            "/v1/completions", {"model": REAL, "prompt": [500] * int(8192 * factor), "max_tokens": 4}
        )
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
    again = client.complete(REAL, "The sky is", max_tokens=6, temperature=0)["choices"][0]["text"]
    assert again == known


def test_token_ids_outside_the_vocabulary_hurt_only_their_sender(client: Client) -> None:
    with ThreadPoolExecutor(2) as pool:
        good = pool.submit(client.complete, REAL, "One two three", max_tokens=24, temperature=0)
        bad = client.post("/v1/completions", {"model": REAL, "prompt": [10_000_000], "max_tokens": 4})
        assert bad.status_code == 400
        assert good.result()["usage"]["completion_tokens"] > 0


def test_metrics_are_whole_and_monotone_from_either_frontend(client: Client, scrape: Scrape) -> None:
    """Two frontends: whichever answers a scrape, every counter is there and none goes back."""
    assert scrape.total("kvrelay_parties", kind="frontend") == 2
    last: dict[Any, float] = {}
    frontends = set()
    before = scrape.total("kvrelay_requests_total")
    for asked in range(1, 13):
        client.chat("sim", "count me", max_tokens=2)
        now = scrape.samples()
        counted = sum(value for (name, _), value in now.items() if name == "kvrelay_requests_total")
        assert counted == before + asked
        for key, value in last.items():
            if key[0].endswith(("_total", "_count", "_bucket", "_sum")):
                assert now[key] >= value, key
        last = now
        frontends |= {dict(labels).get("frontend") for _, labels in now} - {None}
    assert len(frontends) == 2


def blocks(scrape: Scrape, state: str) -> float:
    return scrape.total("kvrelay_kv_blocks", model="sim", state=state)


def test_a_hundred_streams_cancelled_at_random_moments(client: Client, scrape: Scrape) -> None:
    """In prefill, in transfer, in decode: nothing stays used, leased or quarantined on either side."""
    where = urlsplit(client.url)
    rng = random.Random(3)
    total = sum(blocks(scrape, state) for state in ("used", "leased", "quarantined", "cached", "free"))

    def cancelled(n: int) -> int:
        """One stream hung up after a random time; returns the bytes that came."""
        words = " ".join(str(rng.random()) for _ in range(rng.randrange(1, 60)))
        body = {
            "model": "sim",
            "messages": [{"role": "user", "content": f"{n} {words}"}],
            "max_tokens": 400,
            "stream": True,
        }
        with socket.create_connection((where.hostname, where.port)) as connection:
            connection.sendall(request_bytes(CHAT, body))
            connection.settimeout(rng.random() ** 2 * 0.8 + 0.001)
            came = 0
            deadline = time.monotonic() + connection.gettimeout()
            try:
                while (left := deadline - time.monotonic()) > 0:
                    connection.settimeout(left)
                    data = connection.recv(65536)
                    if not data:
                        break
                    came += len(data)
            except TimeoutError:
                pass
            return came

    with ThreadPoolExecutor(20) as pool:
        came = list(pool.map(cancelled, range(100)))
    assert any(count == 0 for count in came), "some were cancelled before their first token"
    assert any(came)
    for state in ("used", "leased", "quarantined"):
        assert scrape.settled("kvrelay_kv_blocks", 0, model="sim", state=state) == 0, state
    assert scrape.settled("kvrelay_attempts", 0, model="sim") == 0
    assert scrape.settled("kvrelay_leases", 0, model="sim") == 0
    assert blocks(scrape, "cached") + blocks(scrape, "free") == total
    assert scrape.settled("kvrelay_in_flight", 0) == 0


def test_health(client: Client) -> None:
    """A pool that the config leaves empty is not degraded."""
    response = client.get("/health")
    assert (response.status_code, response.json()) == (200, {"status": "ok", "degraded": [], "ill": {}})


def test_debug_route_is_not_there_without_an_admin_key(client: Client) -> None:
    """With one: tests/serve/test_router.py."""
    assert client.get("/debug/router").status_code == 404
