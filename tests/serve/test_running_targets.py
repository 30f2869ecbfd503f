"""What a redeploy may take for its pools' sizes: those of its own application, whatever else Serve runs."""

from __future__ import annotations

import json
import subprocess
import sys

POOL = "chat-main-decode"
# In a process of its own: Ray's import warns, and warnings are errors here.
ASK = """
import inspect, json, sys
from types import SimpleNamespace
from ray import cloudpickle
from ray.serve._private import application_state
from ray.serve._private.common import DeploymentID
from serving import app

two = {("small", POOL): 1, ("small", "Frontend"): 1, ("big", POOL): 4, ("big", "Frontend"): 6}

def runs(targets):
    states = {
        DeploymentID(name, application): SimpleNamespace(target_num_replicas=target)
        for (application, name), target in targets.items()
    }
    app.RayInternalKVStore = lambda space: SimpleNamespace(get=lambda key: cloudpickle.dumps(states))

def build_serve_application(name):
    return (lambda args: app.running_targets())({"some": "arguments"})

runs(two)
told = {name: build_serve_application(name) for name in ("small", "big", "new")}
told["unknown of two"] = app.running_targets()
runs({("big", POOL): 4})
told["unknown of one"] = app.running_targets()
task = application_state.build_serve_application._function
told["serve"] = task.__name__, "name" in inspect.signature(task).parameters
print(json.dumps(told))
""".replace("POOL", repr(POOL))


def test_each_application_finds_its_own() -> None:
    said = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True)
    assert json.loads(said.stdout) == {
        "small": {POOL: 1, "Frontend": 1},
        "big": {POOL: 4, "Frontend": 6},
        "new": {},
        "unknown of two": {},
        "unknown of one": {POOL: 4},
        "serve": ["build_serve_application", True],  # the task of Serve's that we look for
    }
    assert "which application is built is not known" in said.stderr
