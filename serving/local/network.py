"""Hosts made of network namespaces on one bridge, and the faults of real networks between them.

Linux, root, iproute2; no kernel module beyond bridge, veth and tbf. Knows nothing of Ray or of what runs
on the hosts. All state is the kernel's: two processes that name the same network see the same one, and
`remove` works from whatever is left of it.

    bridge kvrN (10.77.N.254, so that clients of this machine reach every host)
      port kvrN-NAME  =veth=  eth0 10.77.N.1, .2, ... in the namespace kvrN-NAME
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from serving.errors import StartError

NETWORKS = 100
HOST_NAME = re.compile(r"^[a-z][a-z0-9]{0,7}$")  # a device name may have 15 characters
NOBODY = "02:00:00:00:00:00"  # frames to this address reach no host
SHAPER_BURST = "256k"  # over the 64 KiB that a sender hands over at once
SHAPER_LATENCY = "50ms"
KILL_S = 5.0
TOOLS = ("ip", "bridge", "tc", "unshare", "nsenter")


@dataclass(frozen=True, slots=True)
class Counters:
    """Bytes of whole frames since the host exists."""

    sent_bytes: int
    received_bytes: int


def why_not() -> str | None:
    """Why this machine permits no such network, in one line; None if it does."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (iproute2, util-linux)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = "mount -t tmpfs tmpfs /dev/shm && ip link add kvrprobe type bridge"
    tried = subprocess.run(
        ["unshare", "-n", "-m", "-u", "-i", "-p", "--fork", "--mount-proc", "sh", "-c", probe],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"namespaces are not permitted here: {tried.stderr.strip()}" if tried.returncode else None


class VirtualNetwork:
    """The network `number`, whether it is there or not; hosts are known by name."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.bridge = f"kvr{number}"

    @classmethod
    def create(cls, hosts: Sequence[str]) -> VirtualNetwork:
        """The first free number, with `hosts` at .1, .2, ... Raises StartError if it cannot be made."""
        for name in hosts:
            if not HOST_NAME.match(name):
                raise StartError(f"host name {name!r}; allowed: a letter, then up to 7 letters or digits")
        for number in range(NETWORKS):
            network = cls(number)
            # The name claims the number: the kernel gives it to one of us only.
            if _try("ip", "link", "add", network.bridge, "type", "bridge"):
                try:
                    network._build(hosts)
                except BaseException:
                    network.remove()
                    raise
                return network
        raise StartError(f"no free network among kvr0 to kvr{NETWORKS - 1}; is this root?")

    def _build(self, hosts: Sequence[str]) -> None:
        _run("ip", "link", "set", self.bridge, "addrgenmode", "none", "up")
        _run("ip", "addr", "add", f"10.77.{self.number}.254/24", "dev", self.bridge)
        for index, host in enumerate(hosts):
            inside = ("ip", "-n", self.namespace(host))
            _run("ip", "netns", "add", self.namespace(host))
            _run("ip", "link", "add", self.port(host), "type", "veth", "peer", "eth0", "netns", inside[2])
            _run(*inside, "addr", "add", f"10.77.{self.number}.{index + 1}/24", "dev", "eth0")
            _run(*inside, "link", "set", "eth0", "addrgenmode", "none", "up")
            _run(*inside, "link", "set", "lo", "up")
            self._plug(self.port(host))

    def remove(self) -> None:
        """End every process on every host, and take everything down. Idempotent."""
        for host in self.hosts():
            self.kill(host)
            _try("ip", "link", "del", self._delayed(host))
            _try("ip", "link", "del", self.port(host))
            _try("ip", "netns", "del", self.namespace(host))
        _try("ip", "link", "del", self.bridge)

    # ---------------------------------------------------------------- what is there

    def hosts(self) -> list[str]:
        """Names, in no order."""
        prefix = self.namespace("")
        listed = json.loads(_run("ip", "-json", "netns", "list") or "[]")
        names = [str(entry["name"]) for entry in listed]
        return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]

    def namespace(self, host: str) -> str:
        return f"kvr{self.number}-{host}"

    def port(self, host: str) -> str:
        """The device of this machine whose other end is the host's eth0."""
        return f"kvr{self.number}-{host}"

    def address(self, host: str) -> str:
        """Raises StartError for a host that is not there."""
        shown = _run("ip", "-n", self.namespace(host), "-json", "-4", "addr", "show", "eth0")
        return str(json.loads(shown)[0]["addr_info"][0]["local"])

    def processes(self, host: str) -> list[int]:
        """Process ids, as this machine counts them, of all that runs on the host."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.namespace(host)], capture_output=True, text=True, check=False
        )
        return [int(pid) for pid in listed.stdout.split()]

    def counters(self, host: str) -> Counters:
        statistics = Path("/sys/class/net") / self.port(host) / "statistics"
        from_host = int((statistics / "rx_bytes").read_text())
        to_host = int((statistics / "tx_bytes").read_text())
        return Counters(from_host, to_host)

    # ---------------------------------------------------------------- faults

    def kill(self, host: str) -> None:
        """SIGKILL to all that runs there, until nothing does. Peers see their connections reset."""
        deadline = time.monotonic() + KILL_S
        while left := self.processes(host):
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes {left} on {host} do not end")
            time.sleep(0.02)

    def cut(self, host: str, peer: str | None = None, *, one_way: bool = False) -> None:
        """Lose frames without a word; every carrier stays up.

        Without `peer`: all frames from and to `host`. With it: those between the two, or with `one_way`
        those from `host` to `peer` alone.
        """
        if peer is None:
            _run("bridge", "link", "set", "dev", self._bridge_port(host), "state", "disabled")
            return
        self._misdirect(host, peer)
        if not one_way:
            self._misdirect(peer, host)

    def heal(self, host: str) -> None:
        """Undo every `cut`, `slow` and `delay` that concerns `host`."""
        self._undelay(host)
        _run("bridge", "link", "set", "dev", self._bridge_port(host), "state", "forwarding")
        for other in self.hosts():
            for sender, receiver in ((host, other), (other, host)):
                inside = ("ip", "-n", self.namespace(sender), "neigh")
                _try(*inside, "del", self.address(receiver), "lladdr", NOBODY, "dev", "eth0")
        self.slow(host, None)

    def slow(self, host: str, rate: str | None) -> None:
        """Limit both directions to `rate`, as tc writes it (200mbit); None: no limit."""
        for prefix, device in (
            (["tc"], self.port(host)),
            (["tc", "-n", self.namespace(host)], "eth0"),
        ):
            _try(*prefix, "qdisc", "del", "dev", device, "root")
            if rate is not None:
                shape = ("tbf", "rate", rate, "burst", SHAPER_BURST, "latency", SHAPER_LATENCY)
                _run(*prefix, "qdisc", "add", "dev", device, "root", *shape)

    def delay(self, host: str, ms: float) -> None:
        """Hold every frame from and to `host` for `ms` in each direction: round trips take twice that.

        A process between the host and the bridge does it (serving/local/delay.py); it ends with `heal`.
        Nothing is lost as it comes and goes: for a moment the bridge has both ways to the host.
        """
        self._undelay(host)
        inner, outer = self.port(host), self._delayed(host)
        held = f"kvr{self.number}r{host}"
        _run("ip", "link", "add", outer, "type", "veth", "peer", held)
        _run("ip", "link", "set", held, "addrgenmode", "none", "arp", "off", "up")
        _run("ip", "link", "set", outer, "alias", f"{ms / 1e3:g}")  # for `_undelay`
        # Returns once it holds both devices.
        _run(sys.executable, "-m", "serving.local.delay", inner, held, f"{ms / 1e3:g}")
        self._plug(outer)
        # The machine itself must not answer on a cable that leads to no bridge.
        _run("ip", "link", "set", inner, "nomaster", "arp", "off")

    def _undelay(self, host: str) -> None:
        outer = Path("/sys/class/net", self._delayed(host))
        if outer.exists():
            _run("ip", "link", "set", self.port(host), "arp", "on")
            self._plug(self.port(host))
            time.sleep(float((outer / "ifalias").read_text()))  # what is held comes through
            _run("ip", "link", "del", outer.name)

    def _delayed(self, host: str) -> str:
        return f"kvr{self.number}d{host}"

    def _bridge_port(self, host: str) -> str:
        delayed = self._delayed(host)
        return delayed if Path("/sys/class/net", delayed).exists() else self.port(host)

    def _plug(self, device: str) -> None:
        _run("ip", "link", "set", device, "addrgenmode", "none", "master", self.bridge, "up")

    def _misdirect(self, sender: str, receiver: str) -> None:
        """`sender` believes that `receiver` is at an address which nobody has."""
        inside = ("ip", "-n", self.namespace(sender), "neigh", "replace", self.address(receiver))
        _run(*inside, "lladdr", NOBODY, "dev", "eth0", "nud", "permanent")


def _run(*command: str) -> str:
    """Its output. Raises StartError with what it said."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise StartError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _try(*command: str) -> bool:
    """Whether it worked; one that has nothing to do fails, and that is well."""
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
