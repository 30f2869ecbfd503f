"""What `kvrelay admin` shows a person of workers and of the planner: text of 80 columns, from the JSON."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator, Sequence
from typing import Any

WIDTH = 80
CHANGES = 8  # last ones that are shown


def table(rows: Sequence[Sequence[object]], left: int) -> str:
    """Columns two spaces apart, the first `left` of them flush left, the others flush right."""
    cells = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )


# ------------------------------------------------------------------ workers


def workers_table(told: dict[str, Any]) -> str:
    """Of `GET /admin/workers`."""
    workers = told["workers"]
    if not workers:
        return "no worker is linked"
    rows: list[list[object]] = [["worker", "variant", "pool", "state", "requests", "leases", "free blocks"]]
    for worker in sorted(workers, key=lambda w: (_variant(w), w.get("pool") != "prefill", w["worker"])):
        rows.append(
            [
                worker["worker"],
                _variant(worker),
                worker.get("pool"),
                worker_state(worker),
                worker.get("requests"),
                worker.get("leases"),
                worker.get("free_blocks"),
            ]
        )
    return table(rows, left=4)


def _variant(worker: dict[str, Any]) -> str:
    return f"{worker.get('model', '?')}/{worker.get('variant', '?')}"


def worker_state(worker: dict[str, Any]) -> str:
    if worker["safe_to_remove"]:
        return "safe to remove"
    if not worker["reported"]:
        return "silent"
    if worker["draining"] or worker["ordered_to_drain"]:
        return "draining"
    role = worker.get("role")
    return f"plays {role}" if role not in (None, worker.get("pool")) else "serving"


# ------------------------------------------------------------------ planner


def planner_summary(told: dict[str, Any]) -> str:
    """Of `GET /planner`: mode and budget, every pool now and as wanted, why, and what changed last."""
    parts = [_heading(told)]
    if told["mode"] == "off":  # what it saw and decided last is of some time ago
        told = {**told, "observation": None, "decision": None}
    decided = (told["decision"] or {}).get("variants", {})
    if decided:
        parts.append(_pools(told, decided))
    parts += ["\n".join(_variant_lines(told, name, decided.get(name))) for name in told["targets"]]
    changes = list(_changes(told["history"]))
    if changes:
        parts.append("\n".join(["last changes", *reversed(changes[-CHANGES:])]))
    return "\n\n".join(parts)


def _heading(told: dict[str, Any]) -> str:
    mode = told["mode"]
    means = {
        "off": "decides nothing; `planner mode=advise` or `mode=act` starts it",
        "advise": "says what it would do; `planner mode=act` lets it",
        "act": "scales the pools",
    }
    lines = [f"mode    {mode}: {means.get(mode, '')}", f"budget  {_budget(told)}"]
    if told["trouble"]:
        lines.append(_wrapped("holds   ", told["trouble"]))
    if mode != "off" and told["decision"] is None:
        lines.append("no decision yet")
    return "\n".join(lines)


def _budget(told: dict[str, Any]) -> str:
    unit = str(told["budget_unit"])
    return f"{told['budget']:g} {unit.removesuffix('s') if told['budget'] == 1 else unit}"


def _pools(told: dict[str, Any], decided: dict[str, Any]) -> str:
    seen = (told["observation"] or {}).get("variants", {})
    rows: list[list[object]] = [["variant", "pool", "ready", "starting", "lent", "leaving", "wanted"]]
    for name, wanted in decided.items():
        pools = seen.get(name, {}).get("pools", {})
        for pool in ("prefill", "decode"):
            there = pools.get(pool, {})
            if there or wanted[pool]:
                states = [there.get(key) for key in ("ready", "starting", "lent", "draining")]
                rows.append([name, pool, *states, wanted[pool]])
    frontends = (told["observation"] or {}).get("frontends")
    if frontends is not None:
        wished = told["decision"]["frontends"]
        rows.append(["frontends", "", frontends, None, None, None, frontends if wished is None else wished])
    return table(rows, left=2)


def _variant_lines(told: dict[str, Any], name: str, wanted: dict[str, Any] | None) -> Iterator[str]:
    targets = told["targets"][name]
    yield name
    per_1k = targets["ttft_ms_per_1k_tokens"]
    grows = f" + {per_1k:g} a 1,000 tokens" if per_1k else ""
    yield (
        f"  targets  TTFT {targets['ttft_ms']:g} ms{grows}, ITL {targets['itl_ms']:g} ms, "
        f"p{targets['percentile']:g}"
    )
    for line in told.get("unreachable", {}).get(name, ()):
        yield _wrapped("  limits   ", line)
    seen = (told["observation"] or {}).get("variants", {}).get(name)
    if seen is not None:
        yield f"  load     {_load(seen, wanted)}"
    startup_s = told["startup_s"].get(name)
    if startup_s is not None:
        yield f"  start    {startup_s:g} s until a worker is ready"
    flip_s = told["flip_s"].get(name)
    if flip_s is not None:
        yield f"  flip     {flip_s:g} s until a worker plays its other role"
    if wanted is None:
        return
    yield _wrapped("  reason   ", wanted["reason"])
    if wanted["lent"]:
        pools = ("decode", "prefill") if wanted["lent"] > 0 else ("prefill", "decode")
        yield f"  lent     {abs(wanted['lent'])} of {pools[0]} shall play {pools[1]}"
    if wanted["reachable"] is not None:
        yield _wrapped("  limits   ", f"no number of workers can meet the targets: {wanted['reachable']}")


def _load(seen: dict[str, Any], wanted: dict[str, Any] | None) -> str:
    def told(value: object) -> str:
        return "?" if value is None else str(value)

    arrivals = "no reports of arrivals"
    if seen["arrivals"] is not None and seen["window_s"] > 0:
        arrivals = f"{seen['arrivals'] / seen['window_s']:.3g} requests/s"
    forecast = (wanted or {}).get("forecast_rps")
    if forecast is not None:
        arrivals += f" (expected {forecast:.3g})"
    return f"{arrivals}, {told(seen['queued'])} wait, {told(seen['decoding'])} decode"


def _changes(history: Sequence[dict[str, Any]]) -> Iterator[str]:
    """One entry for each tick and variant that wants something else than the tick before."""
    before: dict[str, dict[str, Any]] = {}
    for tick in history:
        for name, wanted in tick["variants"].items():
            last = before.get(name)
            if last is not None:
                steps = [
                    f"{what} {last[what]} -> {wanted[what]}"
                    for what in ("prefill", "decode", "lent")
                    if last[what] != wanted[what]
                ]
                if steps:
                    at = time.strftime("%H:%M:%S", time.localtime(tick["at_s"]))
                    acted = "" if tick["mode"] == "act" else f" ({tick['mode']} only)"
                    yield _wrapped(f"  {at}  ", f"{name} {', '.join(steps)}{acted}: {wanted['reason']}")
            before[name] = wanted


def _wrapped(label: str, text: str) -> str:
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,
        break_on_hyphens=False,
    )
