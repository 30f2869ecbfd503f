"""What the planner is told: targets, limits, costs of a change. Frozen; checked where they are made."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrouter.deadline import Order
from serving.errors import ConfigError

__all__ = ["PoolLimits", "Settings", "Targets", "VariantSettings"]


@dataclass(frozen=True, slots=True)
class Targets:
    """serving.config.Slo. A request's TTFT target is ttft_ms + ttft_ms_per_1k_tokens * prompt / 1000."""

    ttft_ms: float = 800.0
    ttft_ms_per_1k_tokens: float = 50.0
    itl_ms: float = 40.0  # mean of a request
    percentile: float = 95.0  # of requests that shall meet both

    def ttft_for(self, prompt_tokens: int) -> float:
        return self.ttft_ms + self.ttft_ms_per_1k_tokens * prompt_tokens / 1000

    @property
    def allowed_misses(self) -> float:
        """Share of requests that may miss either."""
        return 1 - self.percentile / 100


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """One Serve deployment. `cost` is in units of the budget: GPUs, or CPUs where there are none."""

    min_replicas: int = 1
    max_replicas: int = 64
    cost: float = 1.0


@dataclass(frozen=True, slots=True)
class VariantSettings:
    targets: Targets = Targets()
    classes: dict[str, Targets] = field(default_factory=dict)  # by name of the priority class
    prefill: PoolLimits = PoolLimits()
    decode: PoolLimits = PoolLimits()
    startup_s: float = 60.0  # from an order to a ready worker
    flip_s: float = 15.0  # until a worker that was told to plays its other role
    order: Order = Order.DEADLINE  # of prompts in the workers
    flips: bool = True  # see `lends`
    idle_to_zero_s: float | None = None  # without any request; None: never

    @property
    def together(self) -> bool:
        """There is no prefill pool: decode workers compute the prompts."""
        return self.prefill.max_replicas == 0

    @property
    def lends(self) -> bool:
        """Workers may be lent to the other role: both deployments are made of the same."""
        return self.flips and not self.together and self.prefill.cost == self.decode.cost


@dataclass(frozen=True, slots=True)
class Settings:
    """Raises ConfigError when the minimum of all pools costs more than the budget."""

    variants: dict[str, VariantSettings]
    budget: float = 8.0
    interval_s: float = 5.0
    predictor: str = "blend"
    error_quantile: float = 0.8  # of past forecast errors, as head-room
    down_window_s: float = 180.0  # a pool shrinks to the most it wanted in this time
    dead_band: float = 0.05  # extra demand that fewer workers must still bear
    recover_s: float = 45.0  # a backlog shall be gone after this
    unplaced_s: float = 600.0  # a scale-up that the cluster has not placed by then is taken back
    retry_s: float = 600.0  # and not tried again for this long
    frontend_rps: float = 200.0
    frontend_inflight: int = 512
    min_frontends: int = 1
    max_frontends: int = 1

    def __post_init__(self) -> None:
        least = sum(
            pool.min_replicas * pool.cost
            for variant in self.variants.values()
            for pool in (variant.prefill, variant.decode)
        )
        if least > self.budget + 1e-9:
            raise ConfigError(
                f"planner.budget = {self.budget:g}; allowed: at least {least:g}, what min_replicas cost"
            )
