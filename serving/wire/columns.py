"""Token ids, attempts and hashes as columns of little-endian bytes."""

from __future__ import annotations

import sys
from array import array


def pack_u32(values: list[int] | array[int]) -> bytes:
    """Little-endian u32 bytes; raises OverflowError for values outside 0 .. 2**32 - 1."""
    column = values if isinstance(values, array) and values.typecode == "I" else array("I", values)
    return _little_endian(column)


def unpack_u32(data: bytes) -> array[int]:
    """Inverse of `pack_u32`; raises ValueError if the length is no multiple of 4."""
    return _column("I", data)


def pack_u64(values: list[int]) -> bytes:
    return _little_endian(array("Q", values))


def unpack_u64(data: bytes) -> array[int]:
    return _column("Q", data)


def _little_endian(column: array[int]) -> bytes:
    if sys.byteorder == "big":
        column = array(column.typecode, column)
        column.byteswap()
    return column.tobytes()


def _column(typecode: str, data: bytes) -> array[int]:
    column = array(typecode)
    column.frombytes(data)
    if sys.byteorder == "big":
        column.byteswap()
    return column
