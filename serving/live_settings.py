"""Settings that change while the application runs; Control owns them, `kvrelay admin` sets them.

They never stand in a deployment's arguments: any change there would restart every replica.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from serving.config import Slo, SloTargets
from serving.config_errors import explain

AnySlo = TypeVar("AnySlo", bound=SloTargets)
Weight = Annotated[float, Meta(ge=0)]


class LiveClass(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What takes the place of targets in the configuration; null: as configured."""

    ttft_ms: Annotated[float, Meta(gt=0)] | None = None
    ttft_ms_per_1k_tokens: Weight | None = None
    itl_ms: Annotated[float, Meta(gt=0)] | None = None
    percentile: Annotated[float, Meta(gt=0, lt=100)] | None = None


class LiveTargets(LiveClass, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Of a model's `slo`; `classes` by name, of those that are configured."""

    classes: dict[str, LiveClass] = msgspec.field(default_factory=dict)


class LivePlanner(Struct, frozen=True, forbid_unknown_fields=True):
    """`budget` in GPUs, or CPUs where no pool has GPUs; null: as configured. `targets` by model."""

    mode: Literal["off", "advise", "act"] | None = None
    budget: Annotated[float, Meta(gt=0)] | None = None
    targets: dict[str, LiveTargets] = msgspec.field(default_factory=dict)


class LiveSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`weights`: share of the traffic of a model's variants, `{model: {variant: weight}}`."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    weights: dict[str, dict[str, Weight]] = msgspec.field(default_factory=dict)
    planner: LivePlanner = LivePlanner()


def slo_of(slo: Slo, changed: LiveTargets | None) -> Slo:
    """A model's targets and those of its classes as they are now."""
    if changed is None:
        return slo
    classes = {name: _with(own, changed.classes.get(name)) for name, own in slo.classes.items()}
    return msgspec.structs.replace(_with(slo, changed), classes=classes)


def _with(slo: AnySlo, changed: LiveClass | None) -> AnySlo:
    if changed is None:
        return slo
    names = LiveClass.__struct_fields__
    values = {name: value for name in names if (value := getattr(changed, name)) is not None}
    return msgspec.structs.replace(slo, **values)


def parse_settings(values: Mapping[str, Any]) -> LiveSettings:
    """Raises ConfigError with one line that names key, value and what is allowed."""
    try:
        return msgspec.convert(values, LiveSettings)
    except msgspec.ValidationError as error:
        raise explain(error, values, LiveSettings) from None


def settings_values(settings: LiveSettings) -> dict[str, Any]:
    values = msgspec.to_builtins(settings)
    assert isinstance(values, dict)
    return values
