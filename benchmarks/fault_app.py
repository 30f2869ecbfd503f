"""The application that faults happen to: who runs where, what it counts, what it still holds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any, Protocol
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.overhead import application
from serving.config import Deadlines

APPLICATION = "llm"
MODEL = "sim"
STEP_MS = 20.0
PREFILL_MS_PER_TOKEN = 0.05
HELD_STATES = ("used", "leased", "quarantined")
POLL_S = 0.05
HTTP_S = 10.0
STRENGTH_S = 90.0  # for replacements of lost replicas: interpreters start, on a busy machine


@dataclass(frozen=True, slots=True)
class Setup:
    """What is deployed. `args`: sections beside those below, as in the YAML; deadlines are the product's
    own unless a test cannot wait for them."""

    prefill: int = 2
    decode: int = 3
    frontends: int = 2
    kv_bytes_per_token: int = 4096
    kv_bytes: int = 384 << 20
    args: Mapping[str, Any] = field(default_factory=dict)
    model: str = MODEL
    engine: Mapping[str, Any] | None = None  # of a real model, instead of the simulated one
    gpus: float = 0.0  # of each worker
    # What it can bear, and how long that takes.
    begun_tokens: int = 40  # of every stream, when a fault strikes
    long_prompt_tokens: int = 6000  # 0.3 s of prefill, 24 MB of KV
    probe_every_s: float = 0.05
    network_bytes_per_s: float = 1e9  # that a read gets at the least

    @property
    def deadlines(self) -> Deadlines:
        return Deadlines(**self.args.get("deadlines", {}))

    @property
    def variant(self) -> dict[str, Any]:
        profile = {
            "decode_ms": STEP_MS,
            "prefill_ms_per_token": PREFILL_MS_PER_TOKEN,
            "kv_bytes_per_token": self.kv_bytes_per_token,
        }
        engine = self.engine or {
            "kind": "sim",
            "profile": profile,
            "kv_bytes": self.kv_bytes,
            "block_tokens": 32,
            "chunk_tokens": 1024,
            "max_batch": 64,
        }

        def pool(replicas: int) -> dict[str, Any]:
            return {
                "replicas": replicas,
                "min_replicas": 1,
                "max_replicas": 8,
                "cpus": 0.1,
                "gpus": self.gpus,
            }

        pools = {"prefill": pool(self.prefill), "decode": pool(self.decode)}
        return {"name": "main", "weights": "smollm2-135m", "engine": engine, **pools}

    def served(self, variant: Mapping[str, Any]) -> dict[str, Any]:
        """The model, with targets so wide that admission refuses nobody while workers are missing."""
        return {"name": self.model, "variants": [variant], "slo": {"ttft_ms": 60_000, "itl_ms": 10_000}}

    def config(self) -> dict[str, Any]:
        args = {
            "models": [self.served(self.variant)],
            "frontend": {"replicas": self.frontends},
            # Every request is handed over: KV must be on its way when workers die.
            "router": {"local_prefill": False},
            **self.args,
        }
        config = application("serving.app:build", args)
        config["applications"][0]["external_scaler_enabled"] = True
        return config

    def changed(self, **args: Any) -> Setup:
        """With other `args` sections: frontends restart for any, workers for those they read."""
        return replace(self, args={**self.args, **args})

    @property
    def pools(self) -> dict[str, int]:
        """Deployment -> replicas."""
        name = f"{self.model}-main"
        return {f"{name}-prefill": self.prefill, f"{name}-decode": self.decode, "Frontend": self.frontends}


@dataclass(frozen=True, slots=True)
class Replica:
    """`pid` as the kernel of its node has it."""

    ident: str
    deployment: str
    pid: int
    state: str

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


class Cluster(Protocol):
    """A LocalCluster with a dashboard, or a NamespaceCluster."""

    @property
    def url(self) -> str: ...

    @property
    def dashboard_url(self) -> str: ...

    @property
    def directory(self) -> Path: ...


Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class App:
    """A deployed `setup` on a running cluster. Its methods block: call those that wait from a thread."""

    def __init__(self, cluster: Cluster, setup: Setup) -> None:
        self.cluster = cluster
        self.setup = setup
        self.model = setup.model
        self.wanted = dict(setup.pools)  # deployment -> replicas, as last asked for
        where = urlsplit(cluster.url)
        self.host, self.port = str(where.hostname), int(where.port or 80)

    # ---------------------------------------------------------------- Serve

    def replicas(self, deployment: str | None = None, state: str = "RUNNING") -> list[Replica]:
        """Those that run, or are in another state, of one deployment or of all."""
        return [
            Replica(replica["replica_id"], name, replica["pid"], replica["state"])
            for name, details in self._deployments().items()
            for replica in details["replicas"]
            if deployment in (None, name) and replica["state"] == state
        ]

    def pool(self, role: str) -> str:
        """Its deployment."""
        return f"{self.model}-main-{role}"

    def workers(self, role: str) -> list[Replica]:
        return self.replicas(self.pool(role))

    def count(self, deployment: str) -> int:
        """Replicas in whatever state."""
        return len(self._deployments()[deployment]["replicas"])

    def targets(self) -> dict[str, int]:
        return {name: details["target_num_replicas"] for name, details in self._deployments().items()}

    def scale(self, deployment: str, replicas: int) -> None:
        """As an external scaler does; returns when Serve took note."""
        path = f"/api/v1/applications/{APPLICATION}/deployments/{deployment}/scale"
        self._ask(path, {"target_num_replicas": replicas})
        self.wanted[deployment] = replicas

    def redeploy(self, setup: Setup) -> None:
        """`serve deploy`; returns when it has been accepted."""
        path = self.cluster.directory / "redeploy.yaml"
        http = {"host": "127.0.0.1", "port": self.port}
        path.write_text(json.dumps({**setup.config(), "http_options": http}))  # JSON is YAML
        command = [sys.executable, "-m", "ray.serve.scripts", "deploy", str(path)]
        environment: dict[str, str] = getattr(self.cluster, "environment", {})
        done = subprocess.run(
            [*command, "-a", self.cluster.dashboard_url],
            env=environment,
            capture_output=True,
            text=True,
            timeout=STRENGTH_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"`serve deploy` failed: {done.stderr[-500:]}")
        self.setup = setup

    def at_strength(self) -> bool:
        """Every pool has as many running replicas as it should and no other, and Control knows them all."""
        deployments = self._deployments()
        for name, wanted in self.wanted.items():
            states = [replica["state"] for replica in deployments[name]["replicas"]]
            if states != ["RUNNING"] * wanted:
                return False
        samples = self.samples()
        parties = [total(samples, "kvrelay_parties", kind=kind) for kind in ("frontend", "worker")]
        frontends = self.wanted["Frontend"]
        return parties == [frontends, sum(self.wanted.values()) - frontends]

    def wait_until(self, what: str, holds: Callable[[], bool], timeout_s: float = STRENGTH_S) -> float:
        """Seconds it took. Raises TimeoutError naming `what`."""
        began_s = time.monotonic()
        while True:
            try:
                if holds():
                    return time.monotonic() - began_s
            except (OSError, KeyError, ValueError):  # Serve or a frontend is being replaced
                pass
            if time.monotonic() - began_s > timeout_s:
                raise TimeoutError(f"not within {timeout_s:.0f} s: {what}")
            time.sleep(POLL_S)

    def _deployments(self) -> dict[str, Any]:
        listed = self._ask("/api/serve/applications/")
        deployments: dict[str, Any] = listed["applications"][APPLICATION]["deployments"]
        return deployments

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        token = (self.cluster.directory / "auth_token").read_text()
        request = Request(
            self.cluster.dashboard_url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"authorization": f"Bearer {token}", "content-type": "application/json"},
        )
        with urlopen(request, timeout=HTTP_S) as answer:
            return json.loads(answer.read() or b"null")

    # ---------------------------------------------------------------- metrics

    def samples(self) -> Samples:
        """One scrape of the whole application. Raises OSError."""
        try:
            with urlopen(f"{self.cluster.url}/metrics", timeout=HTTP_S) as response:
                text = response.read().decode()
        except HTTPError as error:
            error.close()
            raise
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def total(self, name: str, **labels: str) -> float:
        return total(self.samples(), name, **labels)


def total(samples: Samples, name: str, **labels: str) -> float:
    """Sum over all samples of `name` with these labels."""
    return sum(
        value
        for (sample, own), value in samples.items()
        if sample == name and labels.items() <= dict(own).items()
    )


def by_worker(samples: Samples, name: str, **labels: str) -> dict[str, float]:
    """Worker -> sum."""
    found: dict[str, float] = {}
    for (sample, own), value in samples.items():
        named = dict(own)
        if sample == name and labels.items() <= named.items() and "worker" in named:
            found[named["worker"]] = found.get(named["worker"], 0.0) + value
    return found


def change(before: Samples, after: Samples, name: str, **labels: str) -> float:
    """Of a counter. One that fell began anew meanwhile: Control, which keeps them, was replaced."""
    was, now = total(before, name, **labels), total(after, name, **labels)
    return now - was if now >= was else now


def histogram_ms(before: Samples, after: Samples, name: str, share: float) -> float | None:
    """The quantile of what a histogram of seconds saw in between, within its bucket as if evenly spread;
    None if it saw nothing. Beyond the last bound: that bound."""
    bounds = {dict(labels)["le"] for sample, labels in after if sample == f"{name}_bucket"}
    counts = {float(le): change(before, after, f"{name}_bucket", le=le) for le in bounds}
    if not counts.get(inf):
        return None
    wanted, low_s, below = counts[inf] * share, 0.0, 0.0
    for bound_s, count in sorted(counts.items()):
        if count >= wanted and bound_s < inf:
            return round((low_s + (bound_s - low_s) * (wanted - below) / (count - below)) * 1e3, 1)
        if bound_s < inf:
            low_s, below = bound_s, count
    return round(low_s * 1e3, 1)


def held_blocks(samples: Samples) -> int:
    """KV blocks that somebody uses, leases or may still write."""
    return round(sum(total(samples, "kvrelay_kv_blocks", state=state) for state in HELD_STATES))


def in_flight(samples: Samples) -> int:
    """Requests, attempts, leases and sequences that are not over."""
    gauges = ("kvrelay_in_flight", "kvrelay_attempts", "kvrelay_leases", "kvrelay_queue")
    return round(sum(total(samples, gauge) for gauge in gauges))
