"""Several hosts on one machine, a Ray node on each, KVRelay deployed on them: for tests and benchmarks.

    nodes = {"head": {}, "a": {"labels": {"pool": "prefill"}}, "b": {"labels": {"pool": "decode"}}}
    with NamespaceCluster(nodes) as c:      # about 10 s; the first node is Ray's head
        c.deploy({"applications": [...]})   # or the path of a YAML file
        urlopen(c.url + "/v1/models")       # from this machine, as any client
        c.cut("b"); c.heal("b")             # faults: see the methods, and serving/local/network.py
        c.kill("b"); c.start_node("b")

Every host has network, processes, IPC, host name, /dev/shm and temporary directory of its own; the file
system is shared. Needs Linux, root and iproute2: ask `network.why_not()` first. Whoever ends the process
that made the cluster ends the cluster.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from serving.errors import StartError
from serving.local.environment import host_environment
from serving.local.network import Counters, VirtualNetwork
from serving.local.ray_node import (
    DASHBOARD_PORT,
    GCS_PORT,
    Node,
    on_a_host_of_its_own,
    start_command,
)
from serving.local.rollout import wait_until_answered
from serving.local.serve_rest import ServeRest
from serving.local.status import Status

POLL_S = 0.1
STARTS = 3  # of Ray on one node, as a supervisor would
SAVED_CHARS = 2000  # of what `ray start` said, before the file goes
HTTP_PORT = 8000
ARGUMENTS = "cluster.json"


class NamespaceCluster:
    """Nothing is started until `start` (or `with`). `stop` is idempotent and works from any state.

    Args:
        nodes: name (a letter, up to 7 letters or digits) -> `Node`, or its fields as a mapping.
        env: for every node; wins over the defaults. A node's own `env` wins over it.
        python: interpreter of the nodes, where it is not this one (another virtual environment).
        longest_request_s: see `LocalCluster`.
    """

    def __init__(
        self,
        nodes: Mapping[str, Node | Mapping[str, Any]],
        *,
        env: Mapping[str, str] | None = None,
        python: str | Path = sys.executable,
        longest_request_s: float = 600,
        object_store_bytes: int = 100 << 20,
    ) -> None:
        self.nodes = {
            name: node if isinstance(node, Node) else Node(**node) for name, node in nodes.items()
        }
        self.head = next(iter(self.nodes))
        self._env = dict(env or {})
        self._python = str(python)
        self._longest_request_s = longest_request_s
        self._object_store_bytes = object_store_bytes
        self._network: VirtualNetwork | None = None
        self._started: dict[str, subprocess.Popen[bytes]] = {}  # by us; each node's first process
        self._guard: subprocess.Popen[bytes] | None = None

    @classmethod
    def attach(cls, number: int) -> NamespaceCluster:
        """A cluster that another process started on network `number`; StartError if there is none."""
        network = VirtualNetwork(number)
        try:
            arguments = json.loads((directory_of(network) / ARGUMENTS).read_text())
        except OSError:
            raise StartError(f"no cluster on network {number}; start one with `up`") from None
        cluster = cls(**arguments)
        cluster._network = network
        return cluster

    # ---------------------------------------------------------------- what it is

    @property
    def network(self) -> VirtualNetwork:
        if self._network is None:
            raise StartError("the cluster is not started")
        return self._network

    @property
    def directory(self) -> Path:
        """Everybody's files: `<node>/ray` is Ray's session, `<node>/log` what `ray start` said."""
        return directory_of(self.network)

    @property
    def url(self) -> str:
        """The head's HTTP; without a trailing slash."""
        return self.url_of(self.head)

    def url_of(self, node: str) -> str:
        """Only where `proxy_location` puts a proxy."""
        return f"http://{self.address(node)}:{HTTP_PORT}"

    @property
    def dashboard_url(self) -> str:
        """For `serve deploy -a`, with the environment that `run` has."""
        return f"http://{self.address(self.head)}:{DASHBOARD_PORT}"

    def address(self, node: str) -> str:
        return self.network.address(node)

    def counters(self, node: str) -> Counters:
        """What went over the node's cable."""
        return self.network.counters(node)

    def is_up(self, node: str) -> bool:
        return bool(self.network.processes(node))

    # ---------------------------------------------------------------- start and stop

    def start(self, *, timeout_s: float = 180, guarded: bool = True) -> None:
        """Every node, and wait until all are up. Raises StartError; then nothing is left.

        `guarded`: the cluster ends with this process, however that ends.
        """
        try:
            self._network = VirtualNetwork.create(list(self.nodes))
            directory = self.directory
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(mode=0o755)
            (directory / "haproxy").mkdir()
            (directory / ARGUMENTS).write_text(json.dumps(self._arguments()))
            token = directory / "auth_token"
            token.touch(mode=0o600)
            token.write_text(secrets.token_hex(32))
            if guarded:
                guard = [sys.executable, "-m", "serving.local.namespaces", "guard"]
                self._guard = subprocess.Popen(
                    [*guard, f"--network={self.network.number}"],
                    stdin=subprocess.PIPE,
                    start_new_session=True,
                )
            for node in self.nodes:
                self._launch(node)
            deadline = time.monotonic() + timeout_s
            for node in self.nodes:
                self._wait_up(node, deadline)
        except BaseException:
            self.stop()
            raise

    def start_node(self, node: str, *, timeout_s: float = 120) -> None:
        """`ray start` on a host where none runs any more, and wait until it is up."""
        if not self.is_up(node):
            self._launch(node)
            self._wait_up(node, time.monotonic() + timeout_s)

    def stop(self) -> None:
        """End every process of every host, and remove all that was made."""
        if self._guard is not None:  # first: the number may be another cluster's a moment later
            self._guard.kill()
            self._guard.communicate()
            self._guard = None
        if self._network is not None:
            take_down(self._network)
            self._network = None
        for started in self._started.values():
            started.wait()
        self._started.clear()

    def __enter__(self) -> NamespaceCluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _arguments(self) -> dict[str, Any]:
        """For `attach`."""
        return {
            "nodes": {name: asdict(node) for name, node in self.nodes.items()},
            "env": self._env,
            "python": self._python,
            "longest_request_s": self._longest_request_s,
            "object_store_bytes": self._object_store_bytes,
        }

    def _launch(self, name: str) -> None:
        directory, node = self.directory / name, self.nodes[name]
        if name in self._started:
            self._started.pop(name).wait()  # nothing runs there any more
        (directory / "tmp").mkdir(parents=True, exist_ok=True)
        # A dead node's session is of no use, and its name may come again.
        shutil.rmtree(directory / "ray", ignore_errors=True)
        command = start_command(
            node,
            python=self._python,
            address=self.address(name),
            head=None if name == self.head else self.address(self.head),
            temp_dir=directory / "ray",
            object_store_bytes=self._object_store_bytes,
        )
        with (directory / "log").open("wb") as log:
            self._started[name] = subprocess.Popen(
                on_a_host_of_its_own(name, self.network.namespace(name), command),
                env=self._environment(name),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _environment(self, name: str) -> dict[str, str]:
        env = host_environment(self.directory, name, self._longest_request_s)
        return env | self._env | dict(self.nodes[name].env)

    def _wait_up(self, name: str, deadline: float) -> None:
        """`ray start --block` says so once the node is up; on a busy machine it gives up after 30 s."""
        log = self.directory / name / "log"
        starts = 1
        while "--block" not in (said := log.read_text(errors="replace")):
            ended = self._started[name].poll() is not None
            if time.monotonic() > deadline or (ended and starts == STARTS):
                what = "ended" if ended else "did not start in time"
                raise StartError(f"Ray {what} on {name}:\n{said[-SAVED_CHARS:]}")
            if ended:
                self._launch(name)
                starts += 1
            time.sleep(POLL_S)

    # ---------------------------------------------------------------- the application

    def deploy(
        self,
        config: Mapping[str, Any] | str | Path,
        *,
        timeout_s: float = 180,
        on_status: Callable[[Status], None] | None = None,
        health_path: str | None = "/health",
    ) -> None:
        """What `serve deploy config` does, and wait until it answers; a second call redeploys.

        HTTP is on all interfaces, port 8000, whatever the config says. Raises StartError with the
        application's own message if it fails to deploy or is not ready in time.
        """
        deadline = time.monotonic() + timeout_s
        document = config if isinstance(config, Mapping) else yaml.safe_load(Path(config).read_text())
        http = {**(document.get("http_options") or {}), "host": "0.0.0.0", "port": HTTP_PORT}
        self._rest().deploy({**document, "http_options": http}, deadline=deadline, on_status=on_status)
        if health_path is not None:
            wait_until_answered(self.url + health_path, deadline=deadline, check=lambda: None)

    def replicas(self) -> dict[str, list[str]]:
        """Deployment -> the nodes on which its running replicas are."""
        names = {self.address(node): node for node in self.nodes}
        placed: dict[str, list[str]] = {}
        for replica in self._rest().replicas():
            if replica.state == "RUNNING" and replica.address in names:
                placed.setdefault(replica.deployment, []).append(names[replica.address])
        return placed

    def node_of(self, replica: str) -> str:
        """The node of a running replica, by its name. Raises StartError for one that is not there."""
        for known in self._rest().replicas():
            if known.ident == replica:
                names = {self.address(node): node for node in self.nodes}
                return names[known.address or ""]
        raise StartError(f"no replica {replica!r}")

    def _rest(self) -> ServeRest:
        return ServeRest(self.dashboard_url, (self.directory / "auth_token").read_text())

    def run(
        self, node: str, command: Sequence[str], *, timeout_s: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        """`command` as a process of that host, with RAY_ADDRESS set; output is captured."""
        return subprocess.run(
            [*self._enter(node), *command],
            env=self._environment(node) | {"RAY_ADDRESS": f"{self.address(self.head)}:{GCS_PORT}"},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def _enter(self, node: str) -> list[str]:
        init = self._init(node)
        if init is None:
            raise StartError(f"nothing runs on {node}")
        return ["nsenter", f"--target={init}", "--mount", "--uts", "--ipc", "--net", "--pid", "--"]

    def _init(self, node: str) -> int | None:
        """The host's first process: its own number is 1."""
        for pid in self.network.processes(node):
            with suppress(OSError):
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                numbers = next(line for line in lines if line.startswith("NSpid:")).split()[1:]
                if len(numbers) > 1 and numbers[-1] == "1":
                    return pid
        return None

    # ---------------------------------------------------------------- faults

    def kill(self, node: str, *, silently: bool = False) -> None:
        """End everything on the node at once. `silently`: as a power loss, no connection is reset."""
        if silently:
            self.network.cut(node)
        self.network.kill(node)

    def leave(self, node: str) -> None:
        """SIGTERM to its `ray start --block`: the node drains, then ends by itself; does not wait."""
        init = self._init(node)
        if init is not None:
            with suppress(ProcessLookupError):
                os.kill(init, signal.SIGTERM)

    def cut(self, node: str, peer: str | None = None, *, one_way: bool = False) -> None:
        """Lose frames silently: all of `node`'s, or those between it and `peer` (`one_way`: to it)."""
        self.network.cut(node, peer, one_way=one_way)

    def slow(self, node: str, rate: str = "200mbit") -> None:
        """Limit the node's cable, both ways."""
        self.network.slow(node, rate)

    def delay(self, node: str, ms: float = 50) -> None:
        """Every frame from and to the node comes `ms` later."""
        self.network.delay(node, ms)

    def heal(self, node: str) -> None:
        """Undo every cut, slow and delay of the node; it does not start what was killed."""
        self.network.heal(node)


def directory_of(network: VirtualNetwork) -> Path:
    """Short: Ray puts Unix sockets, whose paths may have 107 characters, 75 deep inside."""
    return Path(f"/tmp/kvrnet{network.number}")


def take_down(network: VirtualNetwork) -> None:
    """The network, everything that runs on it, and its files. Idempotent."""
    network.remove()
    shutil.rmtree(directory_of(network), ignore_errors=True)


if __name__ == "__main__":
    from serving.local.namespaces_command import main

    sys.exit(main())
