"""The environment variables a local cluster runs under; the one place where the command reads its own.

Ray and Serve read these where `ray start` is called: every process of the cluster inherits them.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

from serving.gpu_probe import DRIVER_FILE
from serving.local.ports import PortBlock

MARKER = "KVRELAY_LOCAL_CLUSTER"  # its value, one a cluster, marks every process the cluster started
CLOSING = "KVRELAY_CLOSING_DIRECTORY"  # where its frontends listen for the order to close
ADMIN_KEY_FILE = "KVRELAY_ADMIN_KEY_FILE"  # what `kvrelay admin --key-file` is without being given
HAPROXY_HARD_STOP_S = 3600  # at least: a reload cuts streams that are older than this

# Idle OpenMP threads sleep instead of spinning: workers share cores.
QUIET_OPENMP = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}


def new_marker() -> str:
    """Names a cluster and the process that owns it."""
    return f"{os.getpid()}-{secrets.token_hex(8)}"


def marker_of(pid: int) -> str | None:
    """The marker in the environment that process `pid` was started with, or None; raises OSError."""
    with open(f"/proc/{pid}/environ", "rb") as environ:
        for entry in environ.read().split(b"\0"):
            if entry.startswith(MARKER.encode() + b"="):
                return entry.partition(b"=")[2].decode(errors="replace")
    return None


def closing_directory() -> Path | None:
    """Where a frontend listens for the order to close; None but in a local cluster."""
    directory = os.environ.get(CLOSING)
    return None if directory is None else Path(directory)


def admin_key_file() -> str | None:
    return os.environ.get(ADMIN_KEY_FILE) or None


def owner_of(pid: int) -> int | None:
    """The process that owns the cluster which process `pid` belongs to; None if there is none."""
    try:
        marker = marker_of(pid)
    except OSError:
        return None
    owner = (marker or "").partition("-")[0]
    return int(owner) if owner.isdecimal() else None


def cluster_environment(
    marker: str,
    directory: Path,
    ports: PortBlock,
    *,
    flags: bool,
    longest_request_s: float,
    extra: Mapping[str, str],
) -> dict[str, str]:
    """What `ray start` and everything under it sees. `extra` wins over all that is set here.

    `flags`: HAProxy and direct ingress (DESIGN: 54 instead of 860 us of CPU a token); without them Serve
    runs on its own Python proxy, as it does by default.
    """
    env = _inherited() | {
        MARKER: marker,
        CLOSING: str(directory / "closing"),
        "RAY_USAGE_STATS_ENABLED": "0",
        # A token of this cluster's own: other users of the machine cannot submit work to it.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(directory / "auth_token"),
        **QUIET_OPENMP,
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(ports["fallback_http"]),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(ports["fallback_grpc"]),
        # Serve's own metrics ten times a second are a fifth of an idle replica's CPU.
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",
    }
    # All of it is on this machine: UCX listens on no other interface, unless somebody chose one.
    env.setdefault("UCX_NET_DEVICES", "lo")
    if flags:
        env |= node_environment(longest_request_s) | _own_haproxy(directory, ports)
    return env | dict(extra)


def node_environment(longest_request_s: float) -> dict[str, str]:
    """What `ray start` needs on every node of any cluster, so that tokens take the short way.

    HAProxy's settings belong together: streams must outlive a reload, a freed port must rest until no
    old HAProxy may send to it, and a silent response is cut after the longest request's deadline.
    """
    hard_stop_s = max(HAPROXY_HARD_STOP_S, round(longest_request_s) + 5)
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(hard_stop_s),
        "RAY_SERVE_PORT_QUARANTINE_S": str(hard_stop_s + 30),
        "RAY_SERVE_HAPROXY_TIMEOUT_SERVER_S": str(round(longest_request_s) + 5),
        # A dying frontend still takes requests for a moment; with no others in flight it gets them all.
        # Nothing was answered, nothing is changed by asking: another one is asked.
        "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
        # Ray's worker processes start at 0 and serve at 15: whatever starts would starve what streams.
        "RAY_worker_niceness": "0",
        **QUIET_OPENMP,
    }


def network_environment(longest_request_s: float) -> dict[str, str]:
    """What `ray start` needs beside `node_environment` where nodes are machines of their own.

    Every value is for a fault that nobody reports: a host that is gone without a word. Ray's own
    defaults find it after 65 s, UCX's never.
    """
    return {
        # A node is dead after five missed checks: 5 s if its processes died, 10 s if it fell silent. Less
        # would take a short outage of the network for a death, and then every model loads again.
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": "1000",
        "RAY_health_check_failure_threshold": "5",
        # SIGTERM of `ray start --block` drains the node; a replica is stopped at this minus its own window.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(round(longest_request_s) + 65),
        # A read from a silent host fails, instead of waiting for ever; connecting to one gives up.
        "UCX_TCP_USER_TIMEOUT": "5s",
        "UCX_TCP_SYN_CNT": "1",
    }


def tcp_alone() -> dict[str, str]:
    """Nothing but the network may carry KV, within a kernel too. Where there is a GPU, used or not, NIXL
    refuses transports without one for CUDA."""
    return {"UCX_TLS": "cuda_copy,tcp,self" if DRIVER_FILE.exists() else "tcp,self"}


def host_environment(directory: Path, host: str, longest_request_s: float) -> dict[str, str]:
    """What everything on one host of a virtual network sees; `directory` is the whole cluster's."""
    haproxy = directory / "haproxy"
    return (
        _inherited()
        | node_environment(longest_request_s)
        | network_environment(longest_request_s)
        | _haproxy_files(haproxy)
        | {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(directory / "auth_token"),
            "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",
            "RAY_SERVE_HAPROXY_NBTHREAD": "1",
            "TMPDIR": str(directory / host / "tmp"),
            "UCX_NET_DEVICES": "eth0",
        }
        | tcp_alone()
    )


def _inherited() -> dict[str, str]:
    """This process's own environment without Ray's."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    # This interpreter's `ray` and `serve` come first, also when no virtual environment is active.
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    return env


def _haproxy_files(haproxy: Path) -> dict[str, str]:
    """Read where Serve's controller runs, used on every node below a directory of its own."""
    return {
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(haproxy / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(haproxy / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(haproxy / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(haproxy),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(haproxy / "server-state"),
    }


def _own_haproxy(directory: Path, ports: PortBlock) -> dict[str, str]:
    """Files and ports that would collide with another Serve on this machine."""
    http_first, http_last = ports.ingress_http
    grpc_first, grpc_last = ports.ingress_grpc
    return {
        **_haproxy_files(directory / "haproxy"),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(ports["haproxy_stats"]),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(ports["haproxy_metrics"]),
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(http_first),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(http_last),
        "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(grpc_first),
        "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str(grpc_last),
        # How long a leaving frontend keeps listening; one node needs no time for the news to travel.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
    }
