"""A profile: what an engine takes, with where that was measured. JSON; made by `python -m planner.profile`.

A profile holds for one model on one kind of device. Loading it for another one is refused: its numbers
would be believed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvrouter.perf_model import WorkerModels
from planner.observation import FittedTimes
from serving.config import AppConfig
from serving.errors import ConfigError

__all__ = ["Profile", "Provenance", "check_profile", "load_profile", "load_profiles", "save_profile"]


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a profile was measured on. `device`: the GPU's or CPU's model name."""

    model: str
    weights_digest: str
    engine: str
    dtype: str
    device: str
    version: str  # of this package
    date: str


@dataclass(frozen=True, slots=True)
class Profile:
    """`prefill_points`: (uncached, context, ms). `step_points`: (batch, KV tokens, ms)."""

    provenance: Provenance
    times: FittedTimes
    prefill_points: tuple[tuple[int, int, float], ...] = ()
    step_points: tuple[tuple[int, int, float], ...] = ()

    def models(self) -> WorkerModels:
        """For a router or an engine to start from."""
        times = self.times
        return WorkerModels.from_priors(
            prefill=times.prefill,
            step=times.step,
            evidence=times.samples,
            spreads=(times.prefill_spread, times.step_spread),
        )


def save_profile(profile: Profile, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1))


def load_profile(path: Path) -> Profile:
    """Raises ConfigError with one line."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Profile)
    except FileNotFoundError:
        raise ConfigError(
            f"planner profile = {str(path)!r}: no such file; make one with python -m planner.profile"
        ) from None
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"planner profile = {str(path)!r}: {error}; allowed: what planner.profile writes"
        ) from None


def load_profiles(config: AppConfig) -> dict[tuple[str, str], Profile]:
    """Those of the variants that name one, by (model, variant). Raises ConfigError."""
    return {
        (model.name, variant.name): load_profile(Path(variant.times))
        for model in config.models
        for variant in model.variants
        if variant.times is not None
    }


def check_profile(
    profile: Profile, *, weights_digest: str, engine: str, dtype: str, device: str, path: str = "profile"
) -> None:
    """Raises ConfigError when it was measured on something else than this."""
    made = profile.provenance
    for what, theirs, ours in (
        ("weights", made.weights_digest, weights_digest),
        ("engine", made.engine, engine),
        ("dtype", made.dtype, dtype),
        ("device", made.device, device),
    ):
        if theirs != ours:
            raise ConfigError(
                f"planner profile = {path!r} was measured with {what} {theirs!r}; allowed here: {ours!r}"
            )
