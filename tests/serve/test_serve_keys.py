"""Our list of the keys in a Serve file is Serve's own."""

from __future__ import annotations

import pytest
from ray.serve.schema import HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema

from serving.serve_keys import KEYS

SCHEMAS = {
    "": ServeDeploySchema,
    "http_options": HTTPOptionsSchema,
    "applications": ServeApplicationSchema,
}


@pytest.mark.parametrize("section", KEYS, ids=lambda section: section or "top")
def test_keys(section: str) -> None:
    assert set(KEYS[section]) == set(SCHEMAS[section].model_fields)
