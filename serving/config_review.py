"""`check`: what in a valid configuration cannot work, or is wasted; one line and one remedy each.

An error is what would fail at start or refuse requests that the settings invite. A warning is waste, or
what is likely to disappoint. A note says what could not be looked at. Nothing is started or changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from planner.timing_profile import load_profile
from serving.config import AppConfig, Deadlines, Model, PoolConfig, Variant
from serving.errors import ConfigError
from serving.gpu_catalog import GpuType
from serving.live_settings import LivePlanner
from serving.manifest import KNOWN
from serving.model_shape import ModelShape
from serving.planner_settings import unreachable
from serving.pool_capacity import Options, gpu_of, shape_of
from serving.preflight import Plan
from serving.worker_spec import ROLES, find_weights, on_gpu, placement_of


class Level(str, Enum):
    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    where: str  # model/variant and the setting
    problem: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Subject:
    """One variant, and what is known of its model and its GPUs."""

    model: Model
    variant: Variant
    shape: ModelShape | None
    gpu: GpuType | None

    @property
    def name(self) -> str:
        return f"{self.model.name}/{self.variant.name}"

    @property
    def roles(self) -> tuple[str, ...]:
        """Pools that are not empty."""
        return tuple(role for role in ROLES if self.pool(role).replicas or self.pool(role).min_replicas)

    def pool(self, role: str) -> PoolConfig:
        return self.variant.prefill if role == "prefill" else self.variant.decode

    def error(self, setting: str, problem: str, remedy: str) -> Finding:
        return Finding(Level.ERROR, f"{self.name} {setting}", problem, remedy)

    def warning(self, setting: str, problem: str, remedy: str) -> Finding:
        return Finding(Level.WARNING, f"{self.name} {setting}", problem, remedy)

    def note(self, setting: str, problem: str, remedy: str) -> Finding:
        return Finding(Level.NOTE, f"{self.name} {setting}", problem, remedy)


Rule = Callable[[Subject], Iterator[Finding]]


def review(plan: Plan, options: Options) -> list[Finding]:
    """All findings, worst first, else in the order of the file."""
    from serving.review_serving import serving_findings

    found = list(serving_findings(plan))
    for application in plan.applications:
        found += _deadlines(application.deadlines)
        for model in application.models:
            for variant in model.variants:
                found += _of_variant(application, model, variant, options)
    order = list(Level)
    return sorted(found, key=lambda finding: order.index(finding.level))


def _of_variant(
    application: AppConfig, model: Model, variant: Variant, options: Options
) -> Iterator[Finding]:
    from serving.review_lengths import LENGTH_RULES
    from serving.review_memory import memory_rules
    from serving.review_model import MODEL_RULES

    subject = Subject(model, variant, None, None)
    shape, gpu = None, None
    try:
        if on_gpu(variant):
            gpu = gpu_of(variant, options)
    except ConfigError as error:
        unknown = variant.requires.gpu or options.gpu
        remedy = "without it memory and quantisation are not looked at"
        yield (subject.warning if unknown else subject.note)("requires.gpu", error.message, remedy)
    try:
        here, known = find_weights(variant.weights) is not None, variant.weights in KNOWN
        given = (options.shapes or {}).keys() & {model.name, ""}
        if variant.engine.kind == "sim":  # takes the tokenizer alone
            if not (here or known):
                yield subject.note(
                    "weights",
                    f"{variant.weights} is not on this machine",
                    "it has to be where the application runs, before it starts",
                )
        elif here or given:
            shape = shape_of(model.name, variant, options)
        elif not known:
            yield subject.note(
                "weights",
                f"{variant.weights} is not on this machine: what depends on the model is not looked at",
                "give its config.json with --shape FILE",
            )
    except ConfigError as error:
        yield subject.error("weights", error.message, "give a checkpoint that is whole")
    subject = Subject(model, variant, shape, gpu)
    yield from _targets(application, subject)
    for rule in (_pools, *LENGTH_RULES, *MODEL_RULES, memory_rules):
        yield from rule(subject)


def _deadlines(deadlines: Deadlines) -> Iterator[Finding]:
    for name in ("queue_ms", "prefill_ms", "first_token_ms", "transfer_ms", "silence_ms"):
        value = getattr(deadlines, name)
        if value > deadlines.request_ms:
            yield Finding(
                Level.WARNING,
                f"deadlines.{name}",
                f"{value:g} is beyond request_ms ({deadlines.request_ms:g}): it can never pass",
                f"at most {deadlines.request_ms:g}",
            )


def _targets(application: AppConfig, subject: Subject) -> Iterator[Finding]:
    """Those of the model against a profile of this variant, where that is on this machine."""
    times = subject.variant.times
    if times is None or not Path(times).is_file():
        return
    try:
        fitted = load_profile(Path(times)).times
    except ConfigError as error:
        yield subject.error("times", error.message, "make one with python -m planner.profile")
        return
    key = subject.model.name, subject.variant.name
    for found in unreachable(application, LivePlanner(), {key: fitted}).values():
        for problem in found:
            yield subject.warning(
                "slo", problem, "raise it above that, with room for more than one request"
            )


def _pools(subject: Subject) -> Iterator[Finding]:
    """What Ray reserves against what workers of our own engines use; TensorRT-LLM is checked at load."""
    engine = subject.variant.engine
    if engine.kind == "tensorrt_llm":
        return
    wanted = int(on_gpu(subject.variant))
    for role in subject.roles:
        pool = subject.pool(role)
        gpus = placement_of(subject.variant, role).gpus
        if gpus > 1:
            yield subject.error(
                f"{role} parallel",
                f"engine kind {engine.kind} computes on one device; tensor x pipeline = {gpus}",
                "set both to 1, or take engine kind tensorrt_llm",
            )
        if wanted and pool.gpus != wanted:
            yield subject.error(
                f"{role}.gpus",
                f"{pool.gpus:g}, and a worker computes on one GPU",
                f"{role}.gpus: 1; Ray shows a worker no more than it reserved",
            )
        if not wanted and pool.gpus:
            yield subject.warning(
                f"{role}.gpus",
                f"{pool.gpus:g} reserved, and the engine computes on CPUs",
                f"{role}.gpus: 0",
            )
        if not wanted and engine.kind == "torch" and engine.threads > max(1.0, pool.cpus):
            yield subject.warning(
                "engine.threads",
                f"{engine.threads} threads on {pool.cpus:g} CPUs of {role}: they wait for one another",
                f"{role}.cpus: {engine.threads}, or fewer threads",
            )
