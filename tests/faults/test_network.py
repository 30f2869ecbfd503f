"""serving.local.network: each fault is what it says, one after another, and nothing is left behind."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.errors import StartError
from serving.local.network import VirtualNetwork, why_not

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

WAIT_S = 0.6
# Prints after how many seconds the connection was refused: then frames went both ways.
KNOCK = """
import socket, sys, time
began = time.monotonic()
knock = socket.socket()
knock.settimeout(float(sys.argv[2]))
try:
    knock.connect((sys.argv[1], 9))
except ConnectionRefusedError:
    print(time.monotonic() - began)
except TimeoutError:
    print("silence")
"""
SEND = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], 7000))
began = time.monotonic()
peer.sendall(bytes(4 << 20))
peer.shutdown(socket.SHUT_WR)
assert peer.recv(1) == b""
print(time.monotonic() - began)
"""
SINK = """
import socket
listener = socket.create_server(("", 7000))
print("listens", flush=True)
while True:
    peer, _ = listener.accept()
    while peer.recv(1 << 20):
        pass
    peer.close()
"""


@pytest.fixture(scope="module")
def network() -> Iterator[VirtualNetwork]:
    network = VirtualNetwork.create(["head", "a", "b"])
    yield network
    network.remove()


def run(network: VirtualNetwork, host: str, code: str, *arguments: str) -> str:
    command = ["ip", "netns", "exec", network.namespace(host), sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()


def rtt_s(network: VirtualNetwork, source: str, target: str) -> float | None:
    """None: nothing came back."""
    said = run(network, source, KNOCK, network.address(target), str(WAIT_S))
    return None if said == "silence" else float(said)


def reached(network: VirtualNetwork) -> set[str]:
    pairs = [(s, t) for s in ("head", "a", "b") for t in ("head", "a", "b") if s < t]
    return {f"{s}-{t}" for s, t in pairs if rtt_s(network, s, t) is not None}


ALL = {"a-b", "a-head", "b-head"}


def test_cuts_are_silent_and_heal(network: VirtualNetwork) -> None:
    assert reached(network) == ALL
    network.cut("a")
    assert reached(network) == {"b-head"}
    network.heal("a")
    assert reached(network) == ALL
    network.cut("a", "b")
    assert reached(network) == {"a-head", "b-head"}
    network.heal("b")
    assert reached(network) == ALL


def test_a_one_way_cut_loses_one_direction(network: VirtualNetwork) -> None:
    before = network.counters("b")
    network.cut("a", "b", one_way=True)
    assert rtt_s(network, "a", "b") is None  # a's SYN does not arrive
    assert rtt_s(network, "b", "a") is None  # b's does, and a's answer does not
    assert rtt_s(network, "head", "a") is not None
    assert network.counters("b").sent_bytes > before.sent_bytes
    network.heal("a")
    assert reached(network) == ALL


def test_a_delay_holds_frames_each_way(network: VirtualNetwork) -> None:
    network.delay("a", 30)
    rtt_s(network, "head", "a")  # finds the address, which takes a round trip too
    took_s = rtt_s(network, "head", "a")
    assert took_s is not None
    assert 0.06 <= took_s < 0.2
    near_s = rtt_s(network, "head", "b")
    assert near_s is not None
    assert near_s < 0.03
    network.cut("a")
    assert rtt_s(network, "head", "a") is None
    network.heal("a")
    assert reached(network) == ALL
    assert not Path("/sys/class/net", f"kvr{network.number}da").exists()


def test_a_slow_link_is_slow_and_counted(network: VirtualNetwork) -> None:
    inside = ["ip", "netns", "exec", network.namespace("a"), sys.executable, "-c", SINK]
    with subprocess.Popen(inside, stdout=subprocess.PIPE) as sink:
        assert sink.stdout is not None
        sink.stdout.readline()
        fast_s = float(run(network, "b", SEND, network.address("a")))
        before = network.counters("a")
        network.slow("a", "100mbit")
        slow_s = float(run(network, "b", SEND, network.address("a")))
        network.heal("a")
        assert slow_s > 0.25 > fast_s  # 4 MiB at 100 Mbit/s: 0.34 s, less what the shaper lets burst
        assert network.counters("a").received_bytes - before.received_bytes >= 4 << 20
        network.kill("a")
        assert network.processes("a") == []


def test_two_networks_live_side_by_side(network: VirtualNetwork) -> None:
    other = VirtualNetwork.create(["a"])
    try:
        assert other.number != network.number
        assert other.address("a") != network.address("head")
    finally:
        other.remove()
    assert other.hosts() == []
    assert set(network.hosts()) == {"head", "a", "b"}


def test_remove_ends_everything_from_any_state() -> None:
    network = VirtualNetwork.create(["a"])
    network.delay("a", 20)
    network.cut("a")
    inside = ["ip", "netns", "exec", network.namespace("a"), "sleep", "100"]
    with subprocess.Popen(inside) as sleeper:
        deadline = time.monotonic() + 10
        while not network.processes("a") and time.monotonic() < deadline:
            time.sleep(0.01)
        network.remove()
        assert sleeper.wait(5) == -9
    network.remove()
    left = [device.name for device in Path("/sys/class/net").iterdir()]
    assert not [name for name in left if name.startswith(network.bridge)]
    assert network.hosts() == []


@pytest.mark.parametrize("name", ["", "A", "0", "toolongname", "a-b"])
def test_names_that_devices_cannot_have_are_refused(name: str) -> None:
    with pytest.raises(StartError, match="allowed"):
        VirtualNetwork.create([name])
