"""The wire, held to what was written down: schema and bytes of every message, read by another decoder.

A change of serving/wire/ fails here. If the change is meant: raise WIRE_VERSION, then write the snapshot
anew with `python -m tests.unit.test_wire_golden` and look at its diff: fields only ever grow at the end.
"""

from __future__ import annotations

import json
import types
import typing
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest

from serving import wire

GOLDEN = Path(__file__).parent.parent / "golden" / "wire.json"

MESSAGES: tuple[type[wire.Message], ...] = typing.get_args(wire.AnyMessage)


def struct_type(kind: Any) -> type[msgspec.Struct] | None:
    return kind if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else None


def all_structs() -> dict[str, type[msgspec.Struct]]:
    """The messages and every struct inside them, by name."""
    found: dict[str, type[msgspec.Struct]] = {}

    def visit(kind: Any) -> None:
        struct = struct_type(kind)
        if struct is None:
            for inner in typing.get_args(kind):
                visit(inner)
        elif struct.__name__ not in found:
            found[struct.__name__] = struct
            hints = typing.get_type_hints(struct)
            for field in struct.__struct_fields__:
                visit(hints[field])

    for message in MESSAGES:
        visit(message)
    return found


def schema(struct: type[msgspec.Struct]) -> dict[str, Any]:
    hints = typing.get_type_hints(struct)
    fields = []
    for field in msgspec.structs.fields(struct):
        entry = {"name": field.name, "type": type_name(hints[field.name])}
        if not field.required:
            entry["default"] = repr(field.default)
        fields.append(entry)
    return {"tag": struct.__struct_config__.tag, "fields": fields}


def type_name(kind: Any) -> str:
    inner = [type_name(arm) for arm in typing.get_args(kind)]
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " | ".join(inner)
    if inner:
        return f"{typing.get_origin(kind).__name__}[{', '.join(inner)}]"
    return "..." if kind is ... else getattr(kind, "__name__", str(kind))


def example(kind: Any) -> Any:
    """A value of every type that appears on the wire; large integers show their width."""
    simple = {int: 1 << 40, str: "text", bytes: b"\x00\x01\xff", bool: True, float: 1.5, Any: "any"}
    if kind in simple:
        return simple[kind]
    struct = struct_type(kind)
    if struct is not None:
        hints = typing.get_type_hints(struct)
        return struct(*[example(hints[field]) for field in struct.__struct_fields__])
    arms = [arm for arm in typing.get_args(kind) if arm not in (type(None), ...)]
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return example(arms[0])
    if origin is list:
        return [example(arms[0])]
    if origin is tuple:
        return tuple(example(arm) for arm in arms)
    if origin is dict:
        return {example(arms[0]): example(arms[1])}
    raise AssertionError(f"no example of {kind}")


def as_arrays(value: Any) -> Any:
    """What a decoder that knows only MessagePack must see: `[tag, field, ...]`, lists and plain values."""
    if isinstance(value, msgspec.Struct):
        tag = value.__struct_config__.tag
        fields = [as_arrays(getattr(value, name)) for name in value.__struct_fields__]
        return fields if tag is None else [tag, *fields]
    if isinstance(value, list | tuple):
        return [as_arrays(entry) for entry in value]
    if isinstance(value, dict):
        return {key: as_arrays(entry) for key, entry in value.items()}
    return value


def snapshot() -> dict[str, Any]:
    return {
        "wire_version": wire.WIRE_VERSION,
        "structs": {name: schema(struct) for name, struct in sorted(all_structs().items())},
        "examples": {kind.__name__: wire.encode(example(kind)).hex() for kind in MESSAGES},
    }


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(GOLDEN.read_text())
    return content


def test_the_schema_is_what_was_written_down(golden: dict[str, Any]) -> None:
    now = snapshot()
    assert now["structs"] == golden["structs"], __doc__
    assert now["wire_version"] == golden["wire_version"]


def test_tags_are_unique_and_every_message_is_in_the_union() -> None:
    tags = [kind.__struct_config__.tag for kind in MESSAGES]
    assert len(set(tags)) == len(tags)
    assert set(MESSAGES) == set(wire.Message.__subclasses__())


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_bytes_are_what_was_written_down_and_read_back_equal(
    kind: type[wire.Message], golden: dict[str, Any]
) -> None:
    message = example(kind)
    written = bytes.fromhex(golden["examples"][kind.__name__])
    assert wire.encode(message) == written
    assert wire.decode(written) == message


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_the_reference_decoder_reads_the_same(kind: type[wire.Message], golden: dict[str, Any]) -> None:
    written = bytes.fromhex(golden["examples"][kind.__name__])
    assert msgpack.unpackb(written, strict_map_key=False) == as_arrays(example(kind))


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_neighbouring_versions_understand_each_other(kind: type[wire.Message]) -> None:
    """A newer peer's extra fields are ignored; an older peer's missing ones take their defaults."""
    message = example(kind)
    newer = msgpack.packb([*as_arrays(message), "a field from the future"])
    assert wire.decode(newer) == message
    required = sum(field.required for field in msgspec.structs.fields(kind))
    older = msgpack.packb(as_arrays(message)[: 1 + required])
    assert isinstance(wire.decode(older), kind)


def test_structs_inside_messages_grow_at_their_end_only() -> None:
    for name, struct in all_structs().items():
        required = [field.required for field in msgspec.structs.fields(struct)]
        assert required == sorted(required, reverse=True), name
        assert struct.__struct_config__.array_like, name


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(snapshot(), indent=1) + "\n")
