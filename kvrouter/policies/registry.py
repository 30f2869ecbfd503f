"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable

from kvrouter.policies.cache_aware import CacheAware
from kvrouter.policies.dynamo_linear import DynamoLinear
from kvrouter.policies.least_loaded import LeastLoaded
from kvrouter.policies.least_tokens import LeastTokens
from kvrouter.policies.lmetric import Lmetric
from kvrouter.policies.min_ttft import MinTtft
from kvrouter.policies.policy import Policy
from kvrouter.policies.power_of_two import PowerOfTwo
from kvrouter.policies.round_robin import RoundRobin
from kvrouter.policies.sticky import Sticky
from kvrouter.policies.ttft_regret import TtftRegret
from serving.errors import ConfigError

__all__ = ["POLICY_NAMES", "make_policy"]

_WITHOUT_SETTINGS: dict[str, Callable[[], Policy]] = {
    policy.name: policy
    for policy in (
        RoundRobin,
        LeastLoaded,
        PowerOfTwo,
        LeastTokens,
        MinTtft,
        Lmetric,
        DynamoLinear,
        CacheAware,
        Sticky,
    )
}
POLICY_NAMES: tuple[str, ...] = (TtftRegret.name, *_WITHOUT_SETTINGS)


def make_policy(name: str, *, regret_weight: float = 1.0) -> Policy:
    """Raises ConfigError, naming what is allowed. `regret_weight` is `ttft_regret`'s."""
    if regret_weight < 0:
        raise ConfigError(f"router.regret_weight = {regret_weight}; allowed: 0 or more")
    if name == TtftRegret.name:
        return TtftRegret(regret_weight)
    if name not in _WITHOUT_SETTINGS:
        raise ConfigError(f"router.policy = {name!r}; allowed: {', '.join(POLICY_NAMES)}")
    return _WITHOUT_SETTINGS[name]()
