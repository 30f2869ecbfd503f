"""Settings that change while the application runs; Control owns them, `kvrelay admin` sets them.

They never stand in a deployment's arguments: any change there would restart every replica.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from serving.config_errors import explain

Weight = Annotated[float, Meta(ge=0)]


class LiveTargets(Struct, frozen=True, forbid_unknown_fields=True):
    """What takes the place of a model's `slo` in the configuration; null: as configured."""

    ttft_ms: Annotated[float, Meta(gt=0)] | None = None
    ttft_ms_per_1k_tokens: Weight | None = None
    itl_ms: Annotated[float, Meta(gt=0)] | None = None
    percentile: Annotated[float, Meta(gt=0, lt=100)] | None = None


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
