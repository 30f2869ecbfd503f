"""Run as `python -m serving.local.delay DEVICE DEVICE SECONDS`: a cable between two devices, with a delay.

What `tc netem delay` does where the kernel has no netem: every frame that arrives on one device leaves on
the other SECONDS later, in order. The command returns once the cable is there; its process ends when one of
the devices is removed.

Frames travel with their virtio header (PACKET_VNET_HDR): it keeps what the sender left to the hardware,
checksums and segmentation, so that frames of 64 KiB pass whole.
"""

from __future__ import annotations

import os
import selectors
import socket
import sys
import time
from collections import deque
from contextlib import suppress

# <linux/if_packet.h>, <linux/if_ether.h>; Python's socket module has no names for them.
SOL_PACKET = 263
PACKET_VNET_HDR = 15
PACKET_IGNORE_OUTGOING = 23
ETH_P_ALL = 3

FRAME_BYTES = 80_000
BUFFER_BYTES = 64 << 20
BATCH = 64  # frames taken from one device before the other is looked at


class Wire:
    """One direction: frames read from `source`, written to `target` when they are due."""

    def __init__(self, source: socket.socket, target: socket.socket, delay_s: float) -> None:
        self.source = source
        self._target = target
        self._delay_s = delay_s
        self._held: deque[tuple[float, bytes]] = deque()

    def take(self) -> None:
        """Read what has arrived; raises OSError when the device is gone."""
        for _ in range(BATCH):
            try:
                frame = self.source.recv(FRAME_BYTES)
            except BlockingIOError:
                return
            self._held.append((time.monotonic() + self._delay_s, frame))

    def give(self) -> float | None:
        """Write what is due; seconds until the next is, None if nothing is held."""
        while self._held:
            wait_s = self._held[0][0] - time.monotonic()
            if wait_s > 0:
                return wait_s
            _, frame = self._held.popleft()
            with suppress(BlockingIOError):  # a full queue drops, as cables do
                self._target.send(frame)
        return None


def open_device(name: str) -> socket.socket:
    """All frames that arrive on `name`, none that leave."""
    device = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    device.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    device.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    device.setsockopt(socket.SOL_SOCKET, getattr(socket, "SO_RCVBUFFORCE", 33), BUFFER_BYTES)
    device.bind((name, ETH_P_ALL))
    device.setblocking(False)
    return device


def main() -> None:
    first, second = open_device(sys.argv[1]), open_device(sys.argv[2])
    delay_s = float(sys.argv[3])
    _leave_the_caller()
    wires = [Wire(first, second, delay_s), Wire(second, first, delay_s)]
    selector = selectors.DefaultSelector()
    for wire in wires:
        selector.register(wire.source, selectors.EVENT_READ, wire)
    try:
        while True:
            waits = [wait_s for wire in wires if (wait_s := wire.give()) is not None]
            for key, _ in selector.select(min(waits, default=None)):
                key.data.take()
    except OSError:
        return  # ENETDOWN, ENXIO: the device was removed


def _leave_the_caller() -> None:
    """Go on in a process that nobody waits for, with none of the caller's pipes."""
    if os.fork():
        os._exit(0)
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nowhere, descriptor)


if __name__ == "__main__":
    main()
