"""NIXL must not take other people's log handlers down with it when it is imported."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import logging, logging.handlers
held = logging.handlers.MemoryHandler(10, target=logging.StreamHandler())
logging.getLogger("ray.serve").addHandler(held)
from serving.kv.nixl import _load_nixl
_load_nixl()
assert held.target is not None, "closed"
import logging.config
assert logging.config.dictConfig.__name__ == "dictConfig", "left replaced"
"""


def test_serves_log_handler_keeps_its_file() -> None:
    """Without it Serve's controller, started anew, replaces every worker."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
