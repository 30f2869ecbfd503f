"""The classes of one version of TensorRT-LLM, made from the contract: names, order, defaults, kinds.

A field or parameter that the contract says a version lacks is not there, so passing it fails as it would
fail on the real thing. What the contract did not look at (`null`) is taken to be there.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import json
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pydantic

CONTRACT = Path(__file__).parents[1] / "golden" / "trtllm_api.json"
PROFILES = ("1.2.1", "main")
Entry = dict[str, Any]

_KINDS = {
    "positional_or_keyword": inspect.Parameter.POSITIONAL_OR_KEYWORD,
    "var_keyword": inspect.Parameter.VAR_KEYWORD,
    "var_positional": inspect.Parameter.VAR_POSITIONAL,
}
_TYPES: dict[str, Any] = {
    name: getattr(typing, name)
    for name in ("Any", "Dict", "List", "Literal", "Optional", "Tuple", "Union", "Mapping", "Sequence")
} | {"int": int, "str": str, "float": float, "bool": bool, "bytes": bytes, "object": object, "Path": Path}
_TYPES["PositiveInt"] = pydantic.PositiveInt


@functools.cache
def document() -> Entry:
    content: Entry = json.loads(CONTRACT.read_text())
    return content


class Contract:
    """`profile` is one of PROFILES."""

    def __init__(self, profile: str) -> None:
        assert profile in PROFILES, profile
        self.profile = profile
        self._entries = {c["qualified_name"].rpartition(".")[2]: c for c in self._classes()}
        self._made: dict[str, Any] = {}

    def _classes(self) -> list[Entry]:
        found: list[Entry] = [c for c in document()["classes"] if self.has(c)]
        # Two names are used twice: the wire form of an HTTP server, and the engine that is gone.
        twice = ("openai_protocol", "_tensorrt_engine")
        return [c for c in found if not any(part in c["qualified_name"] for part in twice)]

    def has(self, entry: Entry) -> bool:
        if self.profile == "main":
            return entry.get("in_main") is not False and "removed_in" not in entry
        return entry.get("in_1_2_1") is not False

    def entry(self, name: str) -> Entry:
        return self._entries[name]

    def knows(self, name: str) -> bool:
        return name in self._entries

    def fields(self, name: str) -> list[Entry]:
        """Of the class and of what it inherits."""
        entry = self._entries[name]
        base = str(entry.get("base", "")).rpartition(".")[2]
        own = [field for field in entry.get("fields", ()) if self.has(field)]
        inherited = self.fields(base) if base in self._entries else []
        names = {field["name"] for field in own}
        return [field for field in inherited if field["name"] not in names] + own

    def method(self, name: str, method: str) -> Entry | None:
        """None when this version has none of that name."""
        for entry in self._entries[name].get("methods", ()):
            if entry["name"] == method and self.has(entry):
                found: Entry = entry
                return found
        return None

    def default(self, field: Entry) -> Any:
        if self.profile == "1.2.1" and "default_1_2_1" in field:
            return field["default_1_2_1"]
        return field.get("default", field.get("default_repr"))

    # ------------------------------------------------------------ making

    def make(self, name: str) -> Any:
        """The class, made once."""
        if name not in self._made:
            kind = self._entries[name]["kind"]
            if kind.startswith("pydantic"):
                self._made[name] = self._model(name)
            elif kind.startswith("dataclass"):
                self._made[name] = self._dataclass(name, kind)
            else:
                self._made[name] = self._plain(name)
        return self._made[name]

    def _model(self, name: str) -> Any:
        definitions: dict[str, Any] = {}
        for field in self.fields(name):
            kind = self._annotation(field["annotation"])
            if field["required"]:
                definitions[field["name"]] = (kind, ...)
            elif "default_factory" in field:
                definitions[field["name"]] = (kind, pydantic.Field(default_factory=self._factory(field)))
            else:
                definitions[field["name"]] = (kind, self.default(field))
        return pydantic.create_model(
            name,
            __config__=pydantic.ConfigDict(
                extra="forbid", arbitrary_types_allowed=True, protected_namespaces=()
            ),
            **definitions,
        )

    def _dataclass(self, name: str, kind: str) -> Any:
        definitions: list[tuple[str, Any, Any]] = []
        for field in self.fields(name):
            if field["required"]:
                value = dataclasses.field()
            elif "default_factory" in field:
                value = dataclasses.field(default_factory=self._factory(field))
            else:
                value = dataclasses.field(default=self.default(field))
            definitions.append((field["name"], Any, value))
        return dataclasses.make_dataclass(
            name, definitions, slots="slots" in kind, kw_only="kw_only" in kind
        )

    def _plain(self, name: str) -> Any:
        """A compiled class: it takes its fields, in order or by name, and keeps them."""
        parameters = [
            inspect.Parameter(
                field["name"],
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=inspect.Parameter.empty if field["required"] else self.default(field),
            )
            for field in self.fields(name)
            if not field.get("attribute")
        ]
        signature = inspect.Signature(parameters)

        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            self.__dict__.update(bound.arguments)

        return type(name, (), {"__init__": init})

    def _factory(self, field: Entry) -> Callable[[], Any]:
        name = field["default_factory"]
        builtin: dict[str, Callable[[], Any]] = {"list": list, "dict": dict}
        if name in builtin:
            return builtin[name]
        return self.make(name) if name in self._entries else dict

    def _annotation(self, text: str) -> Any:
        """The type; whatever the contract does not describe is Any."""
        contract = self

        class Names(dict[str, Any]):
            def __missing__(self, key: str) -> Any:
                if key in _TYPES:
                    return _TYPES[key]
                if key in contract._entries and contract._entries[key]["kind"].startswith("pydantic"):
                    return contract.make(key)
                return Any

        try:
            return eval(text, {"__builtins__": {}}, Names())
        except (AttributeError, TypeError, SyntaxError):
            return Any

    def enum(self, name: str) -> Any:
        """A named enumeration; members by name."""
        for key, members in document()["enums"].items():
            if key.rpartition(".")[2] == name:
                pairs = members.items() if isinstance(members, dict) else ((m, m) for m in members)
                return enum.Enum(name, list(pairs))
        raise KeyError(name)

    def signature(self, class_name: str, method: str) -> inspect.Signature:
        """With `self`."""
        entry = self.method(class_name, method)
        assert entry is not None, f"{class_name}.{method} is not in {self.profile}"
        parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
        for parameter in entry.get("parameters", ()):
            if not self.has(parameter):
                continue
            has_default = not parameter["required"] and parameter["kind"] == "positional_or_keyword"
            parameters.append(
                inspect.Parameter(
                    parameter["name"],
                    _KINDS[parameter["kind"]],
                    default=self.default(parameter) if has_default else inspect.Parameter.empty,
                )
            )
        return inspect.Signature(parameters)

    def signed(self, class_name: str, method: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` behind the contract's signature: it gets every parameter, by name."""
        signature = self.signature(class_name, method)
        keyword = next(
            (p.name for p in signature.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD), None
        )

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            arguments = dict(bound.arguments)
            rest = arguments.pop(keyword, {}) if keyword is not None else {}
            return function(arguments.pop("self"), **arguments, **rest)

        call.__signature__ = signature  # type: ignore[attr-defined]
        call.__name__ = method
        return call
