"""Named profiles of simulated models: JSON files beside the configs."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import msgspec

from serving.config import SimProfile
from serving.errors import ConfigError

_PACKAGE = "configs"


def load_profile(profile: str | SimProfile | None) -> SimProfile:
    """The profile itself, a path to a JSON file, or a name in configs/profiles. Raises ConfigError."""
    if isinstance(profile, SimProfile):
        return profile
    if profile is None:
        raise ConfigError("engine.profile is missing; engine kind 'sim' needs one")
    path = Path(profile)
    if path.suffix != ".json":
        path = Path(str(resources.files(_PACKAGE) / "profiles" / f"{profile}.json"))
    try:
        return msgspec.json.decode(path.read_bytes(), type=SimProfile)
    except FileNotFoundError:
        known = ", ".join(sorted(p.stem for p in path.parent.glob("*.json"))) or "none"
        raise ConfigError(
            f"engine.profile = {profile!r}: no such profile; in {path.parent}: {known}"
        ) from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"engine.profile = {profile!r}: {error}") from None
