"""The planner's settings out of the configuration and what was changed live. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from planner.settings import PoolLimits, Settings, Targets, VariantSettings
from serving.change_times import Key
from serving.config import AppConfig, PoolConfig, SloTargets, Variant
from serving.live_settings import LivePlanner

# Before one was seen. Streams of our own engines move within a second or two, others end first.
FLIP_S = {"torch": 4.0, "sim": 4.0, "tensorrt_llm": 30.0}


def planner_settings(
    config: AppConfig,
    live: LivePlanner,
    *,
    startups: Mapping[Key, float] | None = None,
    flips: Mapping[Key, float] | None = None,
) -> Settings:
    """`startups`, `flips`: seconds to a ready worker, and to one that plays its other role, where that was
    seen. Raises ConfigError."""
    startups, flips = startups or {}, flips or {}
    planner = config.planner
    variants = {}
    for model in config.models:
        changed = live.targets.get(model.name)
        for variant in model.variants:
            classes = model.slo.classes
            variants[f"{model.name}/{variant.name}"] = VariantSettings(
                targets=_targets(model.slo, msgspec.to_builtins(changed) if changed is not None else {}),
                classes={name: _targets(slo, {}) for name, slo in classes.items()},
                prefill=_limits(config, variant.prefill),
                decode=_limits(config, variant.decode),
                startup_s=startups.get((model.name, variant.name), planner.startup_s),
                flip_s=flips.get((model.name, variant.name), FLIP_S[variant.engine.kind]),
                flips=planner.flips and variant.prefill.replicas > 0 and _alike(variant),
                idle_to_zero_s=planner.idle_to_zero_s,
            )
    return Settings(
        variants=variants,
        budget=budget_of(config, live),
        interval_s=planner.interval_s,
        predictor=planner.predictor,
        down_window_s=planner.down_window_s,
        frontend_inflight=config.frontend.max_inflight // 2,
        min_frontends=config.frontend.replicas,
        max_frontends=config.frontend.max_replicas or config.frontend.replicas,
    )


def budget_of(config: AppConfig, live: LivePlanner) -> float:
    """In GPUs, or in CPUs where no pool has GPUs."""
    if live.budget is not None:
        return live.budget
    given = config.planner.budget.gpus if _on_gpus(config) else config.planner.budget.cpus
    if given is not None:
        return given
    return sum(pool.max_replicas * _cost(config, pool) for pool in _pools(config))


def budget_unit(config: AppConfig) -> str:
    return "GPUs" if _on_gpus(config) else "CPUs"


def _targets(slo: SloTargets, changed: Mapping[str, float | None]) -> Targets:
    names = ("ttft_ms", "ttft_ms_per_1k_tokens", "itl_ms", "percentile")
    values = {name: getattr(slo, name) for name in names}
    return Targets(**values | {name: value for name, value in changed.items() if value is not None})


def _limits(config: AppConfig, pool: PoolConfig) -> PoolLimits:
    """A pool without replicas has no deployment: nothing can grow it."""
    if pool.replicas == 0:
        return PoolLimits(0, 0, _cost(config, pool))
    return PoolLimits(pool.min_replicas, pool.max_replicas, _cost(config, pool))


def _cost(config: AppConfig, pool: PoolConfig) -> float:
    return pool.gpus if _on_gpus(config) else pool.cpus


def _on_gpus(config: AppConfig) -> bool:
    return any(pool.gpus > 0 for pool in _pools(config))


def _pools(config: AppConfig) -> list[PoolConfig]:
    return [p for m in config.models for v in m.variants for p in (v.prefill, v.decode) if p.replicas > 0]


def _alike(variant: Variant) -> bool:
    """A worker can be lent only where both pools are made of the same."""
    a, b = variant.prefill, variant.decode
    return (a.cpus, a.gpus, getattr(a, "parallel", None)) == (b.cpus, b.gpus, getattr(b, "parallel", None))
