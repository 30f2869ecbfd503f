"""Nothing unpickles what came over a socket: product code has no way to."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.unit.test_import_rules import MODULES

# Modules whose readers run code, and NIXL's own serialisers of descriptors, which are pickle underneath.
MODULE = re.compile(r"^(_?pickle|cloudpickle|dill|marshal|shelve|joblib)(\.|$)")
CALLS = {
    "eval",
    "exec",
    "deserialize_descs",
    "get_serialized_descs",
    "deserialize_xfer_descs",
    "recv_pyobj",
    "unsafe_load",
    "full_load",
}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_product_code_unpickles_nothing(module: str) -> None:
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            assert not [a.name for a in node.names if MODULE.match(a.name)]
        elif isinstance(node, ast.ImportFrom):
            assert not MODULE.match(node.module or "")
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            method_of = getattr(getattr(node.func, "value", None), "id", "")
            assert name not in CALLS or (name == "eval" and method_of)  # `model.eval()` runs nothing
            if (method_of, name) == ("torch", "load"):
                assert any(
                    k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords
                )
            if (method_of, name) == ("yaml", "load"):
                assert any("Safe" in ast.unparse(k.value) for k in node.keywords)


def test_nixl_serialises_descriptors_with_pickle_and_metadata_without() -> None:
    """Why the calls above are named. What we do exchange is metadata, read by NIXL's own C++."""
    api = pytest.importorskip("nixl_cu12._api")
    source = ast.parse(Path(api.__file__).read_text())
    methods = {
        node.name: ast.unparse(node) for node in ast.walk(source) if isinstance(node, ast.FunctionDef)
    }
    assert "pickle" in methods["deserialize_descs"]
    for name in ("get_agent_metadata", "add_remote_agent", "send_notif", "get_new_notifs"):
        assert "pickle" not in methods[name], name
