"""`kvrelay capacity`: what each pool of a configuration holds, as a screen of 80 columns or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from serving.capacity import GIB, Capacity
from serving.pool_capacity import Options, PoolCapacity, capacities
from serving.preflight import find_config, read_plan

CANNOT = 2  # exit code: a pool cannot run at all as configured


def run(config: str, options: Options, *, as_json: bool) -> int:
    """Print it. Raises ConfigError."""
    pools = list(capacities(read_plan(find_config(config)), options))
    print(to_json(pools) if as_json else "\n\n".join(screen(pool) for pool in pools))
    return CANNOT if any(pool.capacity.holds == 0 for pool in pools) else 0


def to_json(pools: Sequence[PoolCapacity]) -> str:
    def one(pool: PoolCapacity) -> dict[str, Any]:
        values = asdict(pool)
        capacity = values["capacity"]
        capacity["kv"]["token_bytes"] = pool.capacity.kv.token_bytes
        for name in ("holds", "enough", "kv_use"):
            capacity[name] = getattr(pool.capacity, name)
        if pool.capacity.memory is not None:
            capacity["memory"]["left"] = pool.capacity.memory.left
            capacity["memory"]["used_share"] = pool.capacity.memory.used_share
        return {**values, "workers_needed": pool.workers_needed}

    return json.dumps({"pools": [one(pool) for pool in pools]}, indent=2)


def screen(pool: PoolCapacity) -> str:
    """At most 80 columns."""
    held = pool.capacity
    place = f"{pool.gpus} x {pool.gpu}" if pool.gpu else "GPU" if pool.gpus else "CPU"
    lines = [f"{pool.model}/{pool.variant}: a {pool.role} worker on {place}", ""]
    size = f", {held.parameters / 1e9:,.2f} G parameters" if held.parameters else ""
    lines.append(f"  weights {pool.weights}{size}")
    lines.append(
        f"  KV {pool.kv}, {_bytes(held.kv.token_bytes)} a token{' and GPU' if pool.gpus > 1 else ''}, "
        f"blocks of {held.kv.block_tokens} tokens"
    )
    lines += ["", *_memory_rows(held), "", *_kv_rows(held), "", *_sequence_rows(pool), "", _verdict(pool)]
    return "\n".join(lines)


def _memory_rows(held: Capacity) -> Iterator[str]:
    memory = held.memory
    if memory is None:
        yield "  memory of a worker"
        if held.weights_bytes:
            yield _row("weights", _bytes(held.weights_bytes))
        yield _row("KV cache", _bytes(held.kv_bytes), "engine.kv_bytes")
        return
    yield f"  {'memory of each GPU':<28}{'GiB':>10}{'%':>8}"
    parts = [
        ("weights", memory.weights, ""),
        ("KV cache", max(0, memory.kv), ""),
        ("activations", memory.activations, "estimated"),
        ("transfer buffers", memory.transfer, ""),
        ("CUDA, graphs, NCCL", memory.runtime, "estimated"),
        ("left" if memory.left >= 0 else "missing", memory.left, ""),
        ("card", memory.card, ""),
    ]
    for name, n_bytes, note in parts:
        if n_bytes:
            share = f"{n_bytes / memory.card:8.1%}".replace("%", "")
            yield f"    {name:<26}{n_bytes / GIB:>10,.1f}{share:>8}   {note}".rstrip()


def _kv_rows(held: Capacity) -> Iterator[str]:
    yield "  KV cache of a worker"
    yield _row("blocks", f"{held.blocks:,}")
    yield _row("tokens", f"{held.tokens:,}")


def _sequence_rows(pool: PoolCapacity) -> Iterator[str]:
    held, traffic = pool.capacity, pool.traffic
    answer = f" + {traffic.output_tokens:,} answer" if pool.role == "decode" else ""
    yield f"  sequences of {held.sequence_tokens:,} tokens (p99: {traffic.prompt_tokens:,} prompt{answer})"
    spread = (
        f"{traffic.concurrency:,} over {traffic.workers} worker{'s' * (traffic.workers != 1)}"
        if traffic.concurrency
        else ""
    )
    binds = "<- binds"
    yield _row("wanted", f"{held.wanted:,}", spread or "a full batch")
    yield _row("KV has room for", f"{held.sequences:,}")
    yield _row(
        f"with {_percent(traffic.headroom)} head-room",
        f"{held.sequences_with_headroom:,}",
        binds if held.binds == "KV memory" else "",
    )
    yield _row("max_batch", f"{held.max_batch:,}", binds if held.binds == "max_batch" else "")
    yield _row("KV in use", _percent(held.kv_use), _use_note(held))
    if held.step_floor_ms is not None:
        note = "or more: bytes read over bandwidth"
        yield _row("a decode step", f"{held.step_floor_ms:,.1f} ms", note)


def _use_note(held: Capacity) -> str:
    if held.kv_use > 0.9:
        return "over 90 %: sequences will wait"
    if held.kv_use < 0.5:
        return "under 50 %: the rest caches prefixes"
    return ""


def _verdict(pool: PoolCapacity) -> str:
    held, wanted = pool.capacity, pool.traffic.concurrency
    if held.binds == "weights":
        memory = held.memory
        missing = 0 if memory is None else -(memory.kv if memory.kv <= 0 else memory.left)
        return f"  Does not fit: {missing / GIB:,.1f} GiB of each GPU are missing."
    if held.binds == "sequence length":
        return f"  Does not fit: a sequence of {held.sequence_tokens:,} tokens is beyond the context."
    if not held.holds:
        return f"  Does not fit: not one sequence of {held.sequence_tokens:,} tokens with head-room."
    total = held.holds * pool.replicas
    said = f"  Holds {held.holds:,} sequences a worker, {total:,} in the pool of {pool.replicas}: "
    if held.enough:
        return f"{said}{held.binds} binds."
    if wanted is None:
        return f"{said}KV memory binds,\n  max_batch {held.max_batch} is never reached."
    return f"{said}{wanted:,} need {pool.workers_needed} workers."


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _row(name: str, value: str, note: str = "") -> str:
    return f"    {name:<26}{value:>10}   {note}".rstrip()


def _bytes(n_bytes: float) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n_bytes >= size:
            return f"{n_bytes / size:,.1f} {unit}"
    return f"{n_bytes:,.0f} B"
