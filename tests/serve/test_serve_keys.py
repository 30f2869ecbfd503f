"""Our list of the keys in a Serve file is Serve's own."""

from __future__ import annotations

import json
import subprocess
import sys

from serving.serve_keys import KEYS

ASK = """
import json
from ray.serve.schema import HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema
schemas = {"": ServeDeploySchema, "http_options": HTTPOptionsSchema, "applications": ServeApplicationSchema}
print(json.dumps({section: sorted(schema.model_fields) for section, schema in schemas.items()}))
"""


def test_keys() -> None:
    # In a process of its own: Ray's import warns, and warnings are errors here.
    said = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True)
    assert json.loads(said.stdout) == {section: sorted(keys) for section, keys in KEYS.items()}
