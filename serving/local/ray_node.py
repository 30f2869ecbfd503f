"""One Ray node on a host of its own: how it is started, and on which ports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

GCS_PORT = 6379
DASHBOARD_PORT = 8265
# The same on every node: each has a network of its own. docs/deploy.md says what each is for.
PORTS = (
    "--node-manager-port=6380",
    "--object-manager-port=6381",
    "--runtime-env-agent-port=6382",
    "--dashboard-agent-listen-port=6383",
    "--dashboard-agent-grpc-port=6384",
    "--metrics-export-port=6385",
    "--min-worker-port=20000",
    "--max-worker-port=20499",
)
# The first process of a host: it hands a SIGTERM on, and takes everything along when Ray ends.
INIT = (
    "mount -t tmpfs -o size=1g tmpfs /dev/shm && hostname $1 && shift || exit 1; "
    "trap 'kill -TERM $!' TERM; \"$@\" & wait $!; wait $!"
)


@dataclass(frozen=True, slots=True)
class Node:
    """One host and its `ray start`."""

    labels: Mapping[str, str] = field(default_factory=dict)
    cpus: float = 4  # logical, as Ray counts them
    env: Mapping[str, str] = field(default_factory=dict)


def start_command(
    node: Node, *, python: str, address: str, head: str | None, temp_dir: Path, object_store_bytes: int
) -> list[str]:
    """`ray start --block` of `node` at `address`; `head`: the head's address, None on the head itself."""
    command = [
        *(python, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"),
        f"--node-ip-address={address}",
        f"--num-cpus={node.cpus:g}",
        f"--object-store-memory={object_store_bytes}",
        f"--temp-dir={temp_dir}",
        f"--labels={','.join(f'{key}={value}' for key, value in node.labels.items())}",
        *PORTS,
    ]
    if head is not None:
        return [*command, f"--address={head}:{GCS_PORT}"]
    return [
        *command,
        *("--head", f"--port={GCS_PORT}", "--no-monitor", "--include-log-monitor=False"),
        *(f"--dashboard-host={address}", f"--dashboard-port={DASHBOARD_PORT}"),
        "--ray-client-server-port=6386",
    ]


def on_a_host_of_its_own(name: str, namespace: str, command: list[str]) -> list[str]:
    """`command` in the network `namespace`, with processes, IPC, host name and /dev/shm of its own.

    The first process is INIT: when it ends the kernel ends all others.
    """
    return [
        *("ip", "netns", "exec", namespace),
        *("unshare", "-m", "-u", "-i", "-p", "--fork", "--kill-child", "--mount-proc"),
        *("sh", "-c", INIT, "init", name, *command),
    ]
