"""The planner's settings out of the configuration and what was changed live. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from planner.observation import FittedTimes
from planner.settings import PoolLimits, Settings, Targets, VariantSettings
from serving.change_times import Key
from serving.config import AppConfig, PoolConfig, SloTargets, Variant
from serving.errors import InvalidRequest, NotFound
from serving.live_settings import LivePlanner, slo_of

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
    seen. Raises ConfigError when the budget is below what the minimum of all pools costs."""
    planner = config.planner
    return Settings(
        variants=variant_settings(config, live, startups or {}, flips or {}),
        budget=budget_of(config, live),
        interval_s=planner.interval_s,
        predictor=planner.predictor,
        down_window_s=planner.down_window_s,
        frontend_inflight=config.frontend.max_inflight // 2,
        min_frontends=config.frontend.replicas,
        max_frontends=config.frontend.max_replicas or config.frontend.replicas,
    )


def variant_settings(
    config: AppConfig,
    live: LivePlanner,
    startups: Mapping[Key, float] | None = None,
    flips: Mapping[Key, float] | None = None,
) -> dict[str, VariantSettings]:
    """By `model/variant`, whatever the budget."""
    startups, flips = startups or {}, flips or {}
    planner = config.planner
    variants = {}
    for model in config.models:
        slo = slo_of(model.slo, live.targets.get(model.name))
        for variant in model.variants:
            variants[f"{model.name}/{variant.name}"] = VariantSettings(
                targets=_targets(slo),
                classes={name: _targets(own) for name, own in slo.classes.items()},
                prefill=_limits(config, variant.prefill),
                decode=_limits(config, variant.decode),
                startup_s=startups.get((model.name, variant.name), planner.startup_s),
                flip_s=flips.get((model.name, variant.name), FLIP_S[variant.engine.kind]),
                flips=planner.flips and variant.prefill.replicas > 0 and _alike(variant),
                idle_to_zero_s=planner.idle_to_zero_s,
            )
    return variants


def unreachable(
    config: AppConfig, live: LivePlanner, times: Mapping[Key, FittedTimes]
) -> dict[str, list[str]]:
    """By `model/variant`, targets that even a request alone on a worker misses, with the best value that
    can be had."""
    variants = variant_settings(config, live)
    found = {"/".join(key): _unreachable(variants["/".join(key)], own) for key, own in times.items()}
    return {name: targets for name, targets in found.items() if targets}


def _unreachable(variant: VariantSettings, times: FittedTimes) -> list[str]:
    a, b, c = times.prefill
    ttft_ms, itl_ms = a + b + c / 2, sum(times.step)  # of one token; of one sequence of one token
    found = []
    for name, targets in {"": variant.targets, **variant.classes}.items():
        prefix = f"classes.{name}." if name else ""
        if targets.ttft_for(1) < ttft_ms:
            found.append(f"{prefix}ttft_ms = {targets.ttft_ms:g} is out of reach; best is {ttft_ms:.1f} ms")
        if targets.itl_ms < itl_ms:
            found.append(f"{prefix}itl_ms = {targets.itl_ms:g} is out of reach; best is {itl_ms:.1f} ms")
    return found


def merged_targets(config: AppConfig, now: Mapping[str, Any], wished: Any) -> dict[str, Any]:
    """Live targets by model, with what is `wished`. Raises InvalidRequest and NotFound."""
    targets = dict(now)
    known = {model.name: sorted(model.slo.classes) for model in config.models}
    for model, changes in _by_name(wished, 'targets: give them by model, as in {"chat": {"ttft_ms": 500}}'):
        if model not in known:
            raise NotFound(f"targets: there is no model {model!r}; there are: {', '.join(sorted(known))}")
        before = targets.get(model, {})
        classes = dict(before.get("classes", {}))
        for name, own in _by_name(
            changes.get("classes"), 'classes: give them by name, as in {"batch": {"ttft_ms": 60000}}'
        ):
            if name not in known[model]:
                there = ", ".join(known[model]) or "none"
                raise NotFound(f"targets: {model!r} has no class {name!r}; there are: {there}")
            classes[name] = {**classes.get(name, {}), **own}
        targets[model] = {**before, **changes, "classes": classes}
    return targets


def _by_name(wished: Any, how: str) -> Iterable[tuple[str, dict[str, Any]]]:
    if not isinstance(wished or {}, dict) or not all(
        isinstance(one, dict) for one in (wished or {}).values()
    ):
        raise InvalidRequest(how)
    return (wished or {}).items()


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


def _targets(slo: SloTargets) -> Targets:
    return Targets(slo.ttft_ms, slo.ttft_ms_per_1k_tokens, slo.itl_ms, slo.percentile)


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
