"""Who may import what: the dependency rule of CONTRIBUTING, read off the source and not off the process."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("serving", "prefill", "decode", "kvrouter", "planner")

# The shell around Ray. Nothing else imports it, not even inside a function.
RAY_MODULES = {
    "serving.app",
    "serving.control",
    "serving.frontend",
    "serving.link_key",
    "serving.local.deploy",
    "serving.membership_router",
    "serving.replica",
    "serving.worker",
    "prefill.deployment",
    "decode.deployment",
    "planner.connector",
}

# Pure: what they import, and what that imports, is pure as well. A name with `.*` is a package.
PURE = [
    "kvrouter.*",
    "planner.*",
    "serving.admission",
    "serving.capacity",
    "serving.config",
    "serving.engine.base",
    "serving.engine.pacing",
    "serving.engine.sampling",
    "serving.engine.scheduler",
    "serving.engine.sequence",
    "serving.engine.stopping",
    "serving.errors",
    "serving.fair_shares",
    "serving.footprint",
    "serving.gpu_catalog",
    "serving.kv.block_pool",
    "serving.kv.layout",
    "serving.kv.lease",
    "serving.length_lanes",
    "serving.model_shape",
    "serving.quantization",
    "serving.variant_choice",
    "serving.wire.*",
]
NOT_PURE = {"kvrouter.subscription", "planner.connector", "planner.profile"}
HTTP = {"aiohttp", "fastapi", "http", "httpx", "requests", "starlette", "urllib", "uvicorn"}
IMPURE = {"ray", "asyncio", "threading", "socket", "torch", "transformers", "nixl", *HTTP}

# The HTTP side: workers know nothing of it.
API = {
    "serving.access_log",
    "serving.api",
    "serving.api_keys",
    "serving.chat",
    "serving.coordinator",
    "serving.detokenize",
    "serving.door",
    "serving.frontend",
    "serving.frontend_host",
    "serving.gate",
    "serving.intake",
    "serving.openai",
    "serving.responder",
    "serving.sse",
}
WORKER_SIDE = [
    "prefill.*",
    "decode.*",
    "serving.worker",
    "serving.worker_host",
    "serving.engine.*",
    "serving.kv.*",
]

ENVIRONMENT_READERS = {
    "serving.link_key",  # the key may come from there
    "serving.local.environment",  # what child processes inherit
    "serving.manifest",  # the user's cache directory
    "serving.kv.nixl",  # UCX is configured through it
}

TORCH_HOME = "serving.engine.torch"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_name(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))
}

# An empty __init__.py is no file that says something.
TESTS = {module_name(path): path for path in sorted((ROOT / "tests").rglob("*.py")) if path.stat().st_size}


def selected(patterns: list[str]) -> list[str]:
    """The modules that `patterns` name; a file that is not there yet is no fault."""
    chosen = set()
    for pattern in patterns:
        package = pattern.removesuffix(".*")
        chosen |= {
            name for name in MODULES if name == package or (package != pattern and is_in(name, package))
        }
    return sorted(chosen)


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


@cache
def imports(module: str, *, lazy: bool) -> frozenset[str]:
    """Full names that `module` imports; with `lazy` inside functions too; never those for types only."""
    tree = ast.parse(MODULES[module].read_text())
    return frozenset(name for node in _statements(tree, lazy) for name in _names(node))


def _statements(node: ast.AST, lazy: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not lazy:
            continue
        yield child
        yield from _statements(child, lazy)


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        assert node.module is not None
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def reaches(module: str) -> dict[str, str]:
    """Every outside package that importing `module` loads, with the module of ours that imports it."""
    found: dict[str, str] = {}
    seen, waiting = {module}, [module]
    while waiting:
        here = waiting.pop()
        for name in imports(here, lazy=False):
            if name.partition(".")[0] not in PACKAGES:
                found.setdefault(name.partition(".")[0], here)
            elif name in MODULES and name not in seen:
                seen.add(name)
                waiting.append(name)
    return found


@pytest.mark.parametrize("module", sorted(set(MODULES) - RAY_MODULES))
def test_ray_is_imported_by_its_shell_alone(module: str) -> None:
    assert not {name for name in imports(module, lazy=True) if is_in(name, "ray")}


@pytest.mark.parametrize("module", [name for name in selected(PURE) if name not in NOT_PURE])
def test_pure_modules_reach_nothing_impure(module: str) -> None:
    assert {name: by for name, by in reaches(module).items() if name in IMPURE} == {}


@pytest.mark.parametrize("module", selected(WORKER_SIDE))
def test_workers_do_not_know_the_api(module: str) -> None:
    assert not imports(module, lazy=True) & API


@pytest.mark.parametrize("module", selected(["kvrouter.*", "planner.*"]))
def test_router_and_planner_do_not_know_the_serving_shell(module: str) -> None:
    """They may use the words of the seam and the settings, nothing that runs; the simulator runs the live
    admission, which is pure."""
    allowed = {"serving.config", "serving.engine.base", "serving.errors", "serving.wire"}
    allowed |= {"serving.admission"} if module == "planner.sim_admission" else set()
    ours = {name for name in imports(module, lazy=True) if is_in(name, "serving") and name in MODULES}
    assert module in NOT_PURE or ours - {"serving", "serving.engine"} <= allowed


@pytest.mark.parametrize("module", [name for name in MODULES if not is_in(name, TORCH_HOME)])
def test_torch_is_imported_by_its_engine_alone(module: str) -> None:
    outside = {name.partition(".")[0] for name in imports(module, lazy=True)}
    assert not outside & {"torch", "transformers"}


@pytest.mark.parametrize("module", sorted(set(MODULES) - ENVIRONMENT_READERS))
def test_the_environment_is_read_in_few_places(module: str) -> None:
    tree = ast.parse(MODULES[module].read_text())
    reads = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in ("environ", "getenv")
        and ast.unparse(node.value) == "os"
    ]
    assert reads == [], f"lines {reads}"


@pytest.mark.parametrize("module", sorted(MODULES | TESTS))
def test_a_file_has_one_noun(module: str) -> None:
    text = (MODULES | TESTS)[module].read_text()
    assert len(text.splitlines()) <= 450
    assert not module.rpartition(".")[2].startswith(("util", "helper", "common", "misc"))
    assert ast.get_docstring(ast.parse(text)), "says what it is"


def test_the_rules_name_modules_that_exist() -> None:
    """Guards against a rename that silently takes a module out of a rule; planned ones are listed here."""
    planned = {"planner.connector", "kvrouter.subscription"}
    named = (
        RAY_MODULES
        | API
        | ENVIRONMENT_READERS
        | NOT_PURE
        | {name for name in PURE if not name.endswith("*")}
    )
    assert named - planned <= set(MODULES)
