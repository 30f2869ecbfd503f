"""Writes docs/settings.md from serving/config.py: `python -m tests.settings_page`."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import NODEFAULT, Struct

from serving import config
from serving.config import AppConfig
from serving.config_errors import describe

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "settings.md"
HEAD = """# Settings

<!-- Written by `make map` from serving/config.py. -->

What may stand under `args` in the YAML that `serve run`, `serve deploy` and `kvrelay serve` read. Unknown
keys and values out of range are refused in one line before anything starts; `kvrelay check FILE` finds
more. `[]` is an item of a list, `{}` any key of a mapping. What changes while it runs (weights, log level,
planner) is set by `kvrelay admin` ([operations](operations.md)).
"""


def main() -> None:
    PAGE.write_text(page())


def page() -> str:
    parts = [HEAD]
    first: dict[type[Struct], str] = {}  # where a section is told of
    for path, section in sections(AppConfig, ""):
        if first.setdefault(section, path) != path:
            parts.append(f"\n## `{path}`\n\nAs `{first[section]}`.\n")
            continue
        said = (section.__doc__ or "").strip()
        own = section.__dict__.get("__doc__") is not None and not said.startswith("Base of")
        parts.append(f"\n## `{path}`\n" if path else "\n## (top)\n")
        if own and said and not said.startswith(f"{section.__name__}("):
            parts.append("\n" + re.sub(r"\s+", " ", said) + "\n")
        parts.append("\n| key | default | allowed |\n| --- | --- | --- |\n")
        comments = comments_of(section)
        hints = typing.get_type_hints(section, include_extras=True)
        for field in msgspec.structs.fields(section):
            said = comments.get(field.name, "")
            cells = (
                f"`{field.name}`",
                _default(field),
                _allowed(hints[field.name]) + (f"; {said}" if said else ""),
            )
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return "".join(parts)


def sections(section: type[Struct], path: str) -> Iterator[tuple[str, type[Struct]]]:
    """Each with the path at which it first stands, in the order of the file's own nesting."""
    yield path, section
    hints = typing.get_type_hints(section, include_extras=True)
    for field in msgspec.structs.fields(section):
        for suffix, inner in _inner(hints[field.name]):
            yield from sections(inner, f"{path}.{field.name}{suffix}".lstrip("."))


def comments_of(section: type[Struct]) -> dict[str, str]:
    """The comment beside each field of `section` and of its bases, or in the lines right above it."""
    found: dict[str, str] = {}
    for owner in reversed(section.__mro__):
        if owner.__module__ == config.__name__:
            found |= _comments().get(owner.__name__, {})
    return found


def _comments() -> dict[str, dict[str, str]]:
    source = Path(config.__file__).read_text()
    lines = {
        token.start[0]: (token.string.lstrip("# "), token.line.lstrip().startswith("#"))
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    told: dict[str, dict[str, str]] = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        told[node.name] = {}
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                at = range(field.lineno, (field.end_lineno or field.lineno) + 1)
                said = [lines[n][0] for n in at if n in lines]
                above, n = [], field.lineno - 1
                while n in lines and lines[n][1]:
                    above.insert(0, lines[n][0])
                    n -= 1
                told[node.name][field.target.id] = " ".join(above + said)
    return told


def _inner(kind: Any) -> Iterator[tuple[str, type[Struct]]]:
    if typing.get_origin(kind) is Annotated:
        kind = typing.get_args(kind)[0]
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        for arm in args:
            yield from _inner(arm)
    elif origin is list:
        yield from (("[]" + suffix, inner) for suffix, inner in _inner(args[0]))
    elif origin is dict:
        yield from ((".{}" + suffix, inner) for suffix, inner in _inner(args[1]))
    elif isinstance(kind, type) and issubclass(kind, Struct):
        yield "", kind


def _allowed(kind: Any) -> str:
    return "keys: below" if list(_inner(kind)) else describe(kind)


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default_factory is not NODEFAULT:
        return "empty"
    if field.default is NODEFAULT:
        return "must be given"
    if isinstance(field.default, Struct):
        return ""
    shown = {None: "null", True: "true", False: "false"}
    if field.default is None or isinstance(field.default, bool):
        return shown[field.default]
    return (
        f"{field.default:,}"
        if isinstance(field.default, int) and field.default > 9999
        else str(field.default)
    )


if __name__ == "__main__":
    main()
