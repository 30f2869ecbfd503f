"""What of the application's arguments a worker is started with.

Serve replaces replicas whose arguments change: a new limit of the frontends, or one more replica, must not
make every model load again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serving.config import AppConfig, Variant

READ_BY_WORKERS = ("deadlines", "link", "health", "revision")
COUNTS = ("replicas", "min_replicas", "max_replicas")  # of a pool: Serve's and the planner's business


def worker_args(args: Mapping[str, Any], model: str, variant: str) -> dict[str, Any]:
    """For a worker of that variant, of either role."""
    kept = {key: args[key] for key in READ_BY_WORKERS if key in args}
    variants = next(given["variants"] for given in args["models"] if given["name"] == model)
    own = dict(next(given for given in variants if given.get("name", "main") == variant))
    for role in ("prefill", "decode"):
        pool = own.get(role)
        if pool is not None:
            none = not pool.get("replicas", 1) and not pool.get("min_replicas", 1)
            rest = {key: value for key, value in pool.items() if key not in COUNTS}
            own[role] = rest | ({"replicas": 0, "min_replicas": 0} if none and role == "prefill" else {})
    return {**kept, "models": [{"name": model, "variants": [own]}]}


def find_variant(config: AppConfig, model: str, variant: str) -> Variant:
    return next(v for m in config.models if m.name == model for v in m.variants if v.name == variant)
