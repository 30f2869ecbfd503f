"""Run as `python -m serving.local.guard MARKER DIRECTORY`: ends a cluster whose owner was killed.

Its standard input is a pipe that the owner holds open; the kernel closes it however the owner ends.
"""

from __future__ import annotations

import shutil
import signal
import sys

from serving.local.processes import Family


def main() -> None:
    marker, directory = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the owner decides
    sys.stdin.buffer.read()
    Family(marker).end(grace_s=1)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
