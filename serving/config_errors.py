"""From msgspec's complaint to one line a person can act on: key, value, and what is allowed there."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from serving.errors import ConfigError

_UNKNOWN = re.compile(r"Object contains unknown field `(?P<key>[^`]+)`")
_MISSING = re.compile(r"Object missing required field `(?P<key>[^`]+)`")
_AT = re.compile(r" - at (?:`key` in )?`\$(?P<path>[^`]*)`$")
_PLAIN = re.compile(r"[A-Za-z0-9_-]+")  # keys that may stand in a path as they are
_STEP = re.compile(r"\[(?P<index>\d+|\.\.\.)\]|(?P<key>[^.\[\]]+)")


def explain(error: msgspec.ValidationError, args: Any, root: type[Struct]) -> ConfigError:
    """The ConfigError for what `msgspec.convert(args, root)` raised."""
    text = str(error)
    found = _AT.search(text)
    path = _named(found["path"].lstrip("."), args, root) if found else ""
    what = _AT.sub("", text)
    prefix = f"{path}." if path else ""
    kind = _type_at(root, path)
    if unknown := _UNKNOWN.match(what):
        allowed = [name for section in _sections(kind) for name in section.__struct_fields__]
        close = difflib.get_close_matches(unknown["key"], allowed, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        return ConfigError(
            f"unknown key {prefix}{unknown['key']}; {hint}allowed here: {', '.join(allowed)}"
        )
    if missing := _MISSING.match(what):
        allowed_there = describe(_type_at(root, prefix + missing["key"]))
        return ConfigError(f"{prefix}{missing['key']} is missing; allowed: {allowed_there}")
    value = _value_at(args, path)
    hint = (
        "; in quotes, YAML reads it as a boolean"
        if value is False and "off" in typing.get_args(kind)
        else ""
    )
    return ConfigError(f"{path or 'args'} = {_shown(value)}; allowed: {describe(kind)}{hint}")


def _steps(path: str) -> list[str | int]:
    """`a[0].b` -> ["a", 0, "b"]; of a mapping with free keys msgspec says `[...]`, given as "..."."""
    return [
        match["key"] if match["key"] else int(match["index"]) if match["index"].isdecimal() else "..."
        for match in _STEP.finditer(path)
    ]


def _named(path: str, args: Any, root: type[Struct]) -> str:
    """`path` with each `[...]` as the key whose value is wrong, so that a person finds it."""
    while "[...]" in path:
        before, after = path.split("[...]", 1)
        mapping, kind = _value_at(args, before), _type_at(root, f"{before}[...]")
        wrong = [key for key, value in mapping.items() if not _converts(value, kind)] if kind else []
        if not wrong or not isinstance(wrong[0], str) or not _PLAIN.fullmatch(wrong[0]):
            return path
        path = f"{before}.{wrong[0]}{after}"
    return path


def _converts(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


def _value_at(args: Any, path: str) -> Any:
    for step in _steps(path):
        try:
            args = args[step]
        except (KeyError, IndexError, TypeError):
            break  # "[...]": the mapping as a whole is shown
    return args


def _shown(value: Any) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _type_at(root: type[Struct], path: str) -> Any:
    """The annotation of the setting at `path`."""
    kind: Any = root
    for step in _steps(path):
        if isinstance(step, int):
            kind = next((a for a in _arms(kind) if typing.get_origin(a) is list), None)
            kind = typing.get_args(kind)[0] if kind is not None else None
        elif (mapping := next((a for a in _arms(kind) if typing.get_origin(a) is dict), None)) is not None:
            kind = typing.get_args(mapping)[1]
        else:
            hints: Mapping[str, Any] = {}
            for section in _sections(kind):
                hints = {**hints, **typing.get_type_hints(section, include_extras=True)}
            kind = hints.get(step)
    return kind


def _arms(kind: Any) -> list[Any]:
    """The alternatives of a union, bare of their constraints; of any other type itself."""
    if typing.get_origin(kind) is Annotated:
        kind = typing.get_args(kind)[0]
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [bare for arm in typing.get_args(kind) for bare in _arms(arm)]
    return [kind]


def _sections(kind: Any) -> list[type[Struct]]:
    return [arm for arm in _arms(kind) if isinstance(arm, type) and issubclass(arm, Struct)]


def describe(kind: Any) -> str:
    """In words, what a setting of this type may be."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(describe(arm) for arm in typing.get_args(kind))
    meta = Meta()
    if typing.get_origin(kind) is Annotated:
        kind, *extras = typing.get_args(kind)
        meta = next((extra for extra in extras if isinstance(extra, Meta)), meta)
        if typing.get_origin(kind) in (typing.Union, types.UnionType):
            return describe(kind)
    if typing.get_origin(kind) is Literal:
        return ", ".join(str(value) for value in typing.get_args(kind))
    if kind is int:
        return "a whole number" + _range(meta)
    if kind is float:
        return "a number" + _range(meta)
    if kind is bool:
        return "true or false"
    if kind is str:
        return f"text that matches {meta.pattern}" if meta.pattern else "text"
    if kind is None or kind is type(None):
        return "null"
    if typing.get_origin(kind) is list:
        return "a list" + (f" of at least {meta.min_length}" if meta.min_length else "")
    if typing.get_origin(kind) is dict:
        return f"a mapping of text to {describe(typing.get_args(kind)[1])}"
    if isinstance(kind, type) and issubclass(kind, Struct):
        return f"a mapping with the keys {', '.join(kind.__struct_fields__)}"
    return str(kind)


def _range(meta: Meta) -> str:
    """`, 1 or more`, ` over 0, up to 100`, ..."""
    if meta.ge is not None and meta.le is None and meta.lt is None:
        return f", {meta.ge} or more"
    bounds = {"from": meta.ge, "over": meta.gt, "up to": meta.le, "below": meta.lt}
    said = ", ".join(f"{word} {bound}" for word, bound in bounds.items() if bound is not None)
    return f" {said}" if said else ""
