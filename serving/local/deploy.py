"""Run as `python -m serving.local.deploy CONFIG STATUS_FD`: `serve run CONFIG`, then status until ready.

This is the same `serve run` that a user calls, with the Ray that the environment names (RAY_ADDRESS);
what it prints goes to stdout and stderr, one JSON line per change of status to the file descriptor:

    {"state": "deploying", "applications": {name: {"status", "message", "deployments": {name: status}}}}
    {"state": "running" | "failed", ...}       the last line
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

POLL_S = 0.2


def main() -> int:
    config_path, status_fd = sys.argv[1], int(sys.argv[2])
    with os.fdopen(status_fd, "w", buffering=1) as out:
        try:
            _serve_run(config_path)
        except BaseException as error:  # a SystemExit too: `serve run` has printed why
            out.write(json.dumps({"state": "failed", "message": str(error), "applications": {}}) + "\n")
            raise
        return _watch(out)


def _serve_run(config_path: str) -> None:
    from ray.serve import scripts

    # `serve run` ends a failure with sys.exit(), of code 0.
    scripts.run.main(args=[config_path, "--non-blocking"], standalone_mode=False)


def _watch(out: Any) -> int:
    from ray import serve

    last = None
    while True:
        applications = {
            name: {
                "status": app.status.value,
                "message": app.message,
                "deployments": {
                    name: {"status": deployment.status.value, "message": deployment.message}
                    for name, deployment in app.deployments.items()
                },
            }
            for name, app in serve.status().applications.items()
        }
        states = {app["status"] for app in applications.values()}
        if "DEPLOY_FAILED" in states:
            state = "failed"
        elif states == {"RUNNING"}:
            state = "running"
        else:
            state = "deploying"
        line = json.dumps({"state": state, "applications": applications})
        if line != last:
            out.write(line + "\n")
            last = line
        if state != "deploying":
            return 0 if state == "running" else 1
        time.sleep(POLL_S)


if __name__ == "__main__":
    sys.exit(main())
