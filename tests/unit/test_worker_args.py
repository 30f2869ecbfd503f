"""What a worker is started with: all that it reads, and nothing whose change would make it start again."""

from __future__ import annotations

from typing import Any

import pytest

from serving.config import load_config
from serving.worker_args import find_variant, worker_args

ENGINE = {"kind": "sim", "profile": "zero"}
NONE = {"replicas": 0, "min_replicas": 0}
ARGS: dict[str, Any] = {
    "models": [
        {
            "name": "m",
            "slo": {"ttft_ms": 500},
            "variants": [
                {"weights": "w", "engine": ENGINE, "decode": {"replicas": 2, "cpus": 0.5}},
                {
                    "name": "v2",
                    "weights": "w2",
                    "engine": ENGINE,
                    "prefill": {"replicas": 0, "min_replicas": 0},
                },
            ],
        },
        {"name": "n", "variants": [{"weights": "w3", "engine": ENGINE}]},
    ],
    "deadlines": {"silence_ms": 900},
    "link": {"wire_version": 1},
    "health": {"canary_s": 7},
    "frontend": {"max_inflight": 10},
    "router": {"pull": True},
    "admission": {"mode": "off"},
    "planner": {"mode": "advise"},
}


def changed(path: tuple[str | int, ...], value: object, args: Any = ARGS) -> Any:
    if not path:
        return value
    copy = dict(args) if isinstance(args, dict) else list(args)
    inner = args.get(path[0], {}) if isinstance(args, dict) else args[path[0]]  # type: ignore[arg-type]
    copy[path[0]] = changed(path[1:], value, inner)  # type: ignore[index]
    return copy


@pytest.mark.parametrize(("model", "variant"), [("m", "main"), ("m", "v2"), ("n", "main")])
def test_a_worker_reads_what_is_configured(model: str, variant: str) -> None:
    whole, own = load_config(ARGS), load_config(worker_args(ARGS, model, variant))
    assert (own.deadlines, own.link, own.health) == (whole.deadlines, whole.link, whole.health)
    wanted, got = find_variant(whole, model, variant), find_variant(own, model, variant)
    assert (got.engine, got.weights, got.decode.cpus) == (wanted.engine, wanted.weights, wanted.decode.cpus)
    assert bool(got.prefill.replicas) is bool(wanted.prefill.replicas)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("frontend", "max_inflight"), 20),
        (("router", "pull"), False),
        (("admission", "mode"), "slo"),
        (("planner", "mode"), "act"),
        (("models", 0, "slo", "ttft_ms"), 700),
        (("models", 0, "variants", 0, "decode", "replicas"), 3),
        (("models", 0, "variants", 0, "decode", "max_replicas"), 8),
        (("models", 0, "variants", 1, "weights"), "other"),
        (("models", 1, "variants", 0, "weights"), "other"),
        (("security",), {"api_keys_file": "keys"}),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_what_it_does_not_read_does_not_restart_it(path: tuple[str | int, ...], value: object) -> None:
    assert worker_args(changed(path, value), "m", "main") == worker_args(ARGS, "m", "main")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("deadlines", "silence_ms"), 800),
        (("link", "wire_version"), 2),
        (("health", "canary_s"), 8),
        (("revision",), "2"),
        (("models", 0, "variants", 0, "weights"), "other"),
        (("models", 0, "variants", 0, "decode", "cpus"), 1),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_what_it_reads_does(path: tuple[str | int, ...], value: object) -> None:
    assert worker_args(changed(path, value), "m", "main") != worker_args(ARGS, "m", "main")
