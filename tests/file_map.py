"""Writes docs/files.md, one line a file, from the files' own first lines: `python -m tests.file_map`."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "files.md"
HEAD = """# Every file

<!-- Written by `make map` from the first line of each file. -->

"""

# Files that cannot say themselves what they are.
SAID = {
    ".ci/run": "what CI runs on a fresh clone",
    ".gitignore": "what is made, not written",
    "CONTRIBUTING.md": "the rules of the house",
    "Makefile": "every command there is; `make help`",
    "README.md": "this page",
    "constraints.txt": "the exact version of everything that is installed",
    "pyproject.toml": "the package, its dependencies, and the settings of ruff, mypy and pytest",
    "tests/golden/wire.json": "the wire as written down: schema and bytes of every message",
    "tests/golden/hashing.json": "block hashes that must never change",
    "tests/golden/rayservice.schema.json": "the part of KubeRay's RayService that configs/kuberay uses",
    "configs/profiles/zero.json": "simulated model: computes in no time",
    "configs/profiles/h100-70b.json": "simulated model: published timings of Llama-2-70B on 8 H100, fitted",
}


def main() -> None:
    PAGE.write_text(HEAD + file_map())


def file_map() -> str:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = sorted({path for path in listed.stdout.splitlines() if (ROOT / path).is_file()}, key=_order)
    return "".join(f"- `{path}`: {said}\n" for path in paths if (said := what(path)))


def _order(path: str) -> tuple[bool, str]:
    return "/" in path, path  # the top level first


def what(path: str) -> str:
    """The first sentence the file says of itself; "" for a package file that says nothing."""
    if path in SAID:
        return SAID[path]
    text = (ROOT / path).read_text()
    if path.endswith(".py"):
        first = (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0]
    else:
        first = next((line.lstrip("# ") for line in text.splitlines() if line.startswith("#")), "")
    return " ".join(first.split()).rstrip(".")


if __name__ == "__main__":
    main()
