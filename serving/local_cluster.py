"""A Ray of its own on this machine, with KVRelay deployed on it: for `kvrelay serve`, tests, benchmarks.

    with LocalCluster(cpus=4) as cluster:
        cluster.serve({"applications": [...]})      # or the path of a YAML file
        urlopen(cluster.url + "/v1/models")

Ray runs in a session of its own, on ports and in a directory that no other Ray on the machine uses, so any
number of clusters live side by side. `stop` ends every process that the cluster started and no other.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import yaml

from serving.errors import StartError
from serving.local import processes
from serving.local.closing import close_frontends
from serving.local.environment import cluster_environment, new_marker
from serving.local.ports import PortBlock
from serving.local.rollout import deploy, wait_until_answered
from serving.local.status import Status
from serving.yaml_file import load_yaml

POLL_S = 0.1
STOP_GRACE_S = 1.5
SAVED_LINES = 100


class LocalCluster:
    """Not started until `start` (or `with`); `stop` is idempotent and works from any state.

    Args:
        cpus: logical CPUs Ray hands out; default: those this process may use.
        gpus: GPUs Ray hands out; default: those it finds. More than there are is for engines without any.
        env: added to the environment of every process of the cluster; wins over the defaults.
        flags: HAProxy and direct ingress (what KVRelay recommends); False leaves Serve at its defaults.
        host, port: where HTTP is served; port None takes a free one.
        longest_request_s: HAProxy cuts a response that stays silent for this long (and 5 s).
        dashboard: start Ray's dashboard too: `serve deploy` and `serve status` need it.
        log: file that gets the output of every process started; default: inside `directory`.
    """

    def __init__(
        self,
        *,
        cpus: float | None = None,
        gpus: int | None = None,
        env: Mapping[str, str] | None = None,
        flags: bool = True,
        host: str = "127.0.0.1",
        port: int | None = None,
        longest_request_s: float = 600,
        object_store_bytes: int = 200 << 20,
        dashboard: bool = False,
        log: Path | None = None,
    ) -> None:
        self.cpus = available_cpus() if cpus is None else cpus
        self.host = host
        self._gpus = gpus
        self._flags = flags
        self._extra_env = dict(env or {})
        self._port = port
        self._longest_request_s = longest_request_s
        self._object_store_bytes = object_store_bytes
        self._dashboard = dashboard
        self._log = log
        self._marker = new_marker()
        self._family = processes.Family(self._marker)
        self._ports: PortBlock | None = None
        self._directory: Path | None = None
        self._ray: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self.environment: dict[str, str] = {}  # for child processes that talk to this Ray

    # ---------------------------------------------------------------- what it is

    @property
    def port(self) -> int:
        """The HTTP port."""
        return self._port if self._port is not None else self._owned_ports["http"]

    @property
    def url(self) -> str:
        """Without a trailing slash."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::", "") else self.host
        return f"http://{host}:{self.port}"

    @property
    def address(self) -> str:
        """Ray's address, for RAY_ADDRESS or `ray.init(address)` under `environment`."""
        return f"127.0.0.2:{self._owned_ports['gcs']}"

    @property
    def dashboard_url(self) -> str:
        """For `serve deploy -a`; only with `dashboard=True`."""
        return f"http://127.0.0.1:{self._owned_ports['dashboard']}"

    @property
    def directory(self) -> Path:
        """Ray's session and this cluster's files; removed by `stop`."""
        if self._directory is None:
            raise StartError("the cluster is not started")
        return self._directory

    @property
    def logs(self) -> Path:
        """Of replicas (`worker-*.err`), Serve and Ray; removed by `stop`."""
        return self.directory / "ray" / "session_latest" / "logs"

    @property
    def log(self) -> Path:
        return self._log or self.directory / "cluster.log"

    def processes(self) -> list[psutil.Process]:
        """All living processes of the cluster: Ray's own, HAProxy, replicas; oldest first."""
        return self._family.living()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes()]

    @property
    def _owned_ports(self) -> PortBlock:
        if self._ports is None:
            raise StartError("the cluster is not started")
        return self._ports

    # ---------------------------------------------------------------- start

    def start(self, *, timeout_s: float = 60) -> None:
        """Start Ray and wait until it accepts drivers. Raises StartError; then nothing is left running."""
        try:
            self._start(timeout_s)
        except BaseException:
            self.stop()
            raise

    def _start(self, timeout_s: float) -> None:
        self._ports = ports = PortBlock()
        self._directory = directory = Path(tempfile.mkdtemp(prefix="kvr", dir=_short_temp_dir()))
        (directory / "haproxy").mkdir()
        (directory / "closing").mkdir()
        token = directory / "auth_token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        self.environment = cluster_environment(
            self._marker,
            directory,
            ports,
            flags=self._flags,
            longest_request_s=self._longest_request_s,
            extra=self._extra_env,
        )
        self.environment["RAY_ADDRESS"] = self.address
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
            "--node-ip-address=127.0.0.2",
            f"--num-cpus={self.cpus:g}",
            *([] if self._gpus is None else [f"--num-gpus={self._gpus}"]),
            f"--object-store-memory={self._object_store_bytes}",
            f"--temp-dir={directory / 'ray'}",
            f"--port={ports['gcs']}",
            f"--node-manager-port={ports['node_manager']}",
            f"--object-manager-port={ports['object_manager']}",
            f"--ray-client-server-port={ports['ray_client']}",
            f"--runtime-env-agent-port={ports['runtime_env_agent']}",
            f"--metrics-export-port={ports['metrics_export']}",
            f"--dashboard-agent-listen-port={ports['dashboard_agent']}",
            f"--dashboard-agent-grpc-port={ports['dashboard_agent_grpc']}",
            f"--min-worker-port={ports.workers[0]}",
            f"--max-worker-port={ports.workers[1]}",
            f"--include-dashboard={self._dashboard}",
            f"--dashboard-port={ports['dashboard']}",
            "--no-monitor",  # no autoscaler: one node
            "--include-log-monitor=False",
            "--disable-usage-stats",
        ]
        self._guard = subprocess.Popen(
            [sys.executable, "-m", "serving.local.guard", self._marker, str(directory)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        # `ray start` must not find a cluster to join in its environment.
        env = {key: value for key, value in self.environment.items() if key != "RAY_ADDRESS"}
        with self.log.open("ab") as log:
            self._ray = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a terminal's Ctrl-C reaches us alone; we stop in order
            )
        self._wait_for_ray(time.monotonic() + timeout_s)

    def _wait_for_ray(self, deadline: float) -> None:
        """`ray start --block` says so once the node is up."""
        while "--block" not in self.log.read_text(errors="replace"):
            self.check()
            if time.monotonic() > deadline:
                raise StartError(f"Ray did not start in time; see {self.log}")
            time.sleep(POLL_S)

    def check(self) -> None:
        """Raises StartError if Ray has ended."""
        if self._ray is not None and self._ray.poll() is not None:
            raise StartError(f"Ray ended with code {self._ray.returncode}; see {self.log}")

    # ---------------------------------------------------------------- serve

    def serve(
        self,
        config: Mapping[str, Any] | str | Path,
        *,
        timeout_s: float = 120,
        on_status: Callable[[Status], None] | None = None,
        health_path: str | None = "/health",
    ) -> None:
        """Deploy `config` (of `serve run`) and wait until it answers; a second call redeploys.

        HTTP host and port are the cluster's, whatever the config says. Raises StartError with the
        application's own message if it fails to deploy or is not ready in time.
        """
        deadline = time.monotonic() + timeout_s
        path = self._write_config(config)
        deploy(path, self.environment, self.log, deadline=deadline, on_status=on_status, check=self.check)
        if health_path is not None:
            wait_until_answered(self.url + health_path, deadline=deadline, check=self.check)

    def _write_config(self, config: Mapping[str, Any] | str | Path) -> Path:
        document = config if isinstance(config, Mapping) else load_yaml(Path(config).read_text())
        http = {**(document.get("http_options") or {}), "host": self.host, "port": self.port}
        path = self.directory / "serve.yaml"
        path.write_text(yaml.safe_dump({**document, "http_options": http}, sort_keys=False))
        return path

    # ---------------------------------------------------------------- stop

    def close(self, *, limit_s: float, waits: Callable[[int], None]) -> None:
        """Before `stop`: frontends take nothing new, and what they answer ends, for `limit_s` at the most
        or until `hurry`; what is left then ends with an error. `waits` hears how many answers there are."""
        if self._directory is not None:
            close_frontends(
                self._directory / "closing", limit_s=limit_s, hurry=self._family.hurried, waits=waits
            )

    def stop(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """End every process of the cluster, at the latest `grace_s` + 3 s from now, and remove its files.

        Streams that still run are cut: `close` first where that matters.
        """
        self._family.end(grace_s=grace_s)
        if self._ray is not None:
            self._ray.wait()
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.close()
            self._guard.wait()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        if self._ports is not None:
            self._ports.release()
        self._ray = self._guard = self._directory = self._ports = None

    def hurry(self) -> None:
        """From a signal handler or another thread: let a running `stop` kill at once."""
        self._family.hurry()

    def save_logs(self) -> None:
        """Append the end of what Serve's processes logged to `log`, before `stop` removes it."""
        if self._directory is None:
            return
        with self.log.open("a") as out:
            logs = (self._directory / "ray").glob("session_2*/logs/**/*")
            for path in sorted(
                path for path in logs if path.match("serve/*.log") or path.match("worker-*.err")
            ):
                out.write(f"\n==== {path.name}\n")
                out.writelines(path.read_text(errors="replace").splitlines(keepends=True)[-SAVED_LINES:])

    def kill(self) -> None:
        """As `stop`, without asking first."""
        self.stop(grace_s=0)

    def __enter__(self) -> LocalCluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _short_temp_dir() -> str:
    """Ray puts Unix sockets, whose paths may have 107 characters, 75 deep inside its directory."""
    own = tempfile.gettempdir()
    return own if len(own) <= 20 else "/tmp"


def available_cpus() -> int:
    """CPUs this process may use; a container's limit counts where it is set as an affinity."""
    with suppress(AttributeError):  # not on every system
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
