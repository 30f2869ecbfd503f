"""kvrouter.hashing: one fixed byte layout, the same in every process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvrouter.hashing import HASH_VERSION, block_hashes, namespace_seed, next_hash, token_bytes

ROOT = Path(__file__).parents[2]
GOLDEN = json.loads((ROOT / "tests/golden/hashing.json").read_text())
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=80).map(lambda ids: array("I", ids))


def test_golden_version() -> None:
    assert GOLDEN["version"] == HASH_VERSION


@pytest.mark.parametrize("case", GOLDEN["seeds"], ids=lambda c: f"{c['model']}|{c['adapter']}|{c['salt']}")
def test_golden_seeds(case: dict[str, str]) -> None:
    seed = namespace_seed(case["model"], case["adapter"], case["salt"])
    assert f"{seed:016x}" == case["seed"]


@pytest.mark.parametrize("case", GOLDEN["chains"], ids=lambda c: c["name"])
def test_golden_chains(case: dict[str, Any]) -> None:
    hashes = block_hashes(array("I", case["tokens"]), case["block_tokens"], int(case["seed"], 16))
    assert [f"{h:016x}" for h in hashes] == case["hashes"]


def test_layout_spelled_out() -> None:
    """The docstring's byte layout, written by hand."""
    seed = xxh3_64_intdigest(
        b"kvrelay-kv\x01" + b"\x01\x02\0\0\0mm" + b"\x02\x01\0\0\0a" + b"\x03\x01\0\0\0s"
    )
    assert namespace_seed("mm", "a", "s") == seed
    block = b"".join(token.to_bytes(4, "little") for token in range(8))
    assert block_hashes(block, 8, seed) == [xxh3_64_intdigest(seed.to_bytes(8, "little") + block)]


@pytest.mark.parametrize("order", ["0", "12345"])
def test_hash_stable_across_processes(order: str) -> None:
    code = (
        "from array import array; from kvrouter.hashing import *;"
        "print(block_hashes(array('I', range(64)), 16, namespace_seed('m', 'a', 's')))"
    )
    env = {**os.environ, "PYTHONHASHSEED": order}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == str(block_hashes(array("I", range(64)), 16, namespace_seed("m", "a", "s")))


def test_salt_isolates() -> None:
    """Kinds are tagged: a salt is never an adapter, "" is not None, and fields do not run together."""
    seeds = [
        namespace_seed("m"),
        namespace_seed("m", "a"),
        namespace_seed("m", None, "a"),
        namespace_seed("m", ""),
        namespace_seed("m", None, ""),
        namespace_seed("m", "a", "a"),
        namespace_seed("m", "ab", "c"),
        namespace_seed("m", "a", "bc"),
        namespace_seed("ma"),
    ]
    assert len(set(seeds)) == len(seeds)


@given(TOKENS, st.sampled_from([8, 16, 32]), st.integers(0, 2**64 - 1))
def test_forms_agree(tokens: array[int], size: int, seed: int) -> None:
    """From an array, from bytes, and one block after the other."""
    whole = block_hashes(tokens, size, seed)
    assert whole == block_hashes(token_bytes(tokens), size, seed)
    parent, single = seed, []
    for start in range(0, len(tokens) - size + 1, size):
        parent = next_hash(parent, token_bytes(tokens[start : start + size]))
        single.append(parent)
    assert whole == single
    assert len(whole) == len(tokens) // size


@given(TOKENS, st.integers(0, 2**64 - 1))
def test_a_chain_goes_on_from_any_block(tokens: array[int], seed: int) -> None:
    whole = block_hashes(tokens, 8, seed)
    if whole:
        assert block_hashes(tokens[8:], 8, whole[0]) == whole[1:]


def test_little_endian_u32() -> None:
    assert token_bytes(array("I", [1, 0x01020304])) == bytes([1, 0, 0, 0, 4, 3, 2, 1])
