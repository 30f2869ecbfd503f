"""A profile: what an engine takes, with where that was measured. JSON; made by `python -m planner.profile`.

A profile holds for one model in one layout on one kind of device. Loading it for another one is refused:
its numbers would be believed.
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
    """What a profile was measured on. `device`: the GPU's or CPU's model name.

    `parallel`: "tp2pp1", as many GPUs as that comes to; "": made before profiles said so. `threads`: of the
    engine on a CPU; 0 on GPUs.
    """

    model: str
    weights_digest: str
    engine: str
    dtype: str
    device: str
    version: str  # of this package
    date: str
    parallel: str = ""
    threads: int = 0


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
        profile = msgspec.json.decode(path.read_bytes(), type=Profile)
    except OSError as error:
        raise ConfigError(
            f"planner profile = {str(path)!r}: {(error.strerror or 'not readable').lower()}; "
            "make one with python -m planner.profile"
        ) from None
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"planner profile = {str(path)!r}: {error}; allowed: what planner.profile writes"
        ) from None
    for name, terms in (("prefill", profile.times.prefill), ("step", profile.times.step)):
        if min(terms) < 0 or not any(terms):
            raise ConfigError(
                f"planner profile = {str(path)!r}: times.{name} = {list(terms)}; "
                "allowed: none below 0, not all 0"
            )
    return profile


def load_profiles(config: AppConfig) -> dict[tuple[str, str], Profile]:
    """Those of the variants that name one, by (model, variant). Raises ConfigError."""
    return {
        (model.name, variant.name): load_profile(Path(variant.times))
        for model in config.models
        for variant in model.variants
        if variant.times is not None
    }


def check_profile(profile: Profile, here: Provenance, path: str = "profile") -> None:
    """Raises ConfigError when it was measured on something else than `here`, or does not say so."""
    made = profile.provenance
    if not made.parallel:
        raise ConfigError(
            f"planner profile = {path!r} does not say in which layout it was measured; "
            "make it anew with python -m planner.profile"
        )
    for what in ("weights_digest", "engine", "dtype", "device", "parallel", "threads"):
        theirs, ours = getattr(made, what), getattr(here, what)
        if theirs != ours:
            raise ConfigError(
                f"planner profile = {path!r} was measured with {what} {theirs!r}; allowed here: {ours!r}"
            )
