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
    shipped = Path(str(resources.files(_PACKAGE) / "profiles"))
    named = {path.stem: path for path in shipped.glob("*.json")}
    try:
        path = Path(profile) if profile.endswith(".json") else named[profile]
        return msgspec.json.decode(path.read_bytes(), type=SimProfile)
    except (KeyError, OSError):
        raise ConfigError(
            f"engine.profile = {profile!r}: no such profile; allowed: {', '.join(sorted(named))}, "
            "or the path of a .json file"
        ) from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"engine.profile = {profile!r}: {error}") from None
