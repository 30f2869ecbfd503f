"""Nothing unpickles what came over a socket of ours: product code has no way to, but for one place.

`serving.app` reads the Serve controller's own record out of Ray's store, where only who has Ray's token can
write, and so could run code anyway (docs/security.md).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Set
from pathlib import Path

import pytest

from tests.unit.test_import_rules import MODULES

# Modules whose readers run code, and NIXL's own serialisers of descriptors, which are pickle underneath.
MODULE = re.compile(r"(^|\.)(_?pickle|cloudpickle|dill|marshal|shelve|joblib)(\.|$)")
ALLOWED = {"serving.app": ["ray.cloudpickle", "cloudpickle.loads"]}
SAFE_LOADERS = {"yaml.SafeLoader", "yaml.CSafeLoader"}
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


def unpickling(source: str) -> Iterator[str]:
    """Every name by which a module could run what it reads."""
    tree = ast.parse(source)
    safe = SAFE_LOADERS | {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and SAFE_LOADERS & {ast.unparse(base) for base in node.bases}
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if MODULE.search(alias.name))
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module or ''}.{alias.name}" for alias in node.names]
            yield from (name for name in names if MODULE.search(name))
        elif isinstance(node, ast.Call):
            yield from _calls(node, safe)
        elif isinstance(node, ast.Attribute) and MODULE.search(ast.unparse(node)):
            yield ast.unparse(node)


def _calls(node: ast.Call, safe: Set[str]) -> Iterator[str]:
    """`safe`: loaders of YAML."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    method_of = getattr(getattr(node.func, "value", None), "id", "")
    if name in CALLS and not (name == "eval" and method_of):  # `model.eval()` runs nothing
        yield name
    given = {k.arg: ast.unparse(k.value) for k in node.keywords}
    if (method_of, name) == ("torch", "load") and given.get("weights_only") != "True":
        yield "torch.load"
    if (method_of, name) == ("yaml", "load") and given.get("Loader") not in safe:
        yield "yaml.load"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_product_code_unpickles_nothing(module: str) -> None:
    assert list(unpickling(MODULES[module].read_text())) == ALLOWED.get(module, [])


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import pickle", ["pickle"]),
        ("import ray.cloudpickle as c", ["ray.cloudpickle"]),
        ("from ray import cloudpickle", ["ray.cloudpickle"]),
        ("from ray.cloudpickle import loads", ["ray.cloudpickle.loads"]),
        ("import ray\nray.cloudpickle.loads(x)", ["ray.cloudpickle.loads", "ray.cloudpickle"]),
        ("from multiprocessing.reduction import pickle", ["multiprocessing.reduction.pickle"]),
        ("eval(x)", ["eval"]),
        ("torch.load(x)", ["torch.load"]),
        ("yaml.load(x, Loader=yaml.Loader)", ["yaml.load"]),
        ("class L(yaml.Loader): pass\nyaml.load(x, Loader=L)", ["yaml.load"]),
        ("class L(yaml.SafeLoader): pass\nyaml.load(x, Loader=L)", []),
        ("model.eval(), torch.load(x, weights_only=True), yaml.load(x, Loader=yaml.CSafeLoader)", []),
        ("from serving.unpickled import pickles", []),
    ],
)
def test_the_look_itself(source: str, names: list[str]) -> None:
    assert list(unpickling(source)) == names


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
