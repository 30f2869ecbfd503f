"""How long a worker takes, learnt while it works: a prompt's prefill and a decode step. Pure.

    T_prefill(u, ctx)  = a + b*u + c*u*(ctx - u/2)     u tokens to compute of a context of ctx
    T_step(batch, kv)  = d + e*batch + f*kv            kv tokens held by the whole batch
    T_move(tokens)     = g + h*tokens                  KV over the wire

All in milliseconds. The third term of T_prefill is attention: token i of the context costs in proportion to
i, and the computed tokens are the last u. DistServe's simulator fits the same forms (simdistserve, profile
data). Each worker has models of its own, because GPUs, clocks and neighbours differ.

The fit is recursive least squares with slowly drifting coefficients (Ljung, System Identification, section
11.2: the Kalman form, which stays stable when all samples are alike) on *relative* errors, so that a prompt
of 50 ms counts as much as one of 5 s. A sample far off what the recent ones let expect is left out, since
one stall must not bend the model; many in a row are a change, and are believed.

Small samples say little of large ones: what a short prompt took beyond the prediction could be attention,
at a price per pair of tokens that would make hours of a long one. So a term is no more uncertain than one
sample of `reach` would leave it; what is small up to there is learnt beyond it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["LinearModel", "MoveModel", "PrefillModel", "StepModel", "WorkerModels"]

DRIFT = 0.002  # how far a coefficient may wander per sample, of its first uncertainty
PRIOR_ERROR = 0.5  # of a sample's time that any one term may turn out to explain
MOST_NOISE = 0.3  # relative; while a model is still wrong its errors are not noise
GATE = 4.0  # samples further off than this many typical errors are left out
GATE_FLOOR = 0.10  # but never those within 10 %
TYPICAL_RATE = 0.1  # of the running mean that says what a typical error is
WARM_UP = 8  # samples before the gate closes; outliers in a row that are a change
# The features of such a sample, of each model: a prompt of 4,096 tokens, a batch of 32 of 2,048 each.
PREFILL_REACH = (1.0, 4096.0, 0.5 * 4096 * 4096)
STEP_REACH = (1.0, 32.0, 32.0 * 2048)
MOVE_REACH = (1.0, 4096.0)
FLOOR_MS = 0.01  # times below this are taken as this, so that relative errors exist


class LinearModel:
    """ms = sum of coefficient * feature; all coefficients >= 0, starting from a prior."""

    def __init__(self, prior: tuple[float, ...], reach: tuple[float, ...]) -> None:
        """`prior`: from a calibration or a guess. A zero means "believed absent", but may be learnt.
        `reach`: the features of a sample that is large enough to tell the terms apart.

        Raises ValueError on a negative coefficient, or when all are zero.
        """
        if min(prior) < 0 or max(prior) == 0:
            raise ValueError(f"coefficients must be >= 0 and not all 0, got {prior}")
        self._reach = reach
        self.coefficients = list(prior)
        self.samples = 0  # taken in
        self.evidence = 0  # samples behind the coefficients, those of a peer they were taken from included
        self.outliers = 0  # left out
        self._covariance: list[list[float]] = []
        self._most: list[float] = []  # variances it started with
        self._warming = WARM_UP  # samples still taken in without a gate
        self._typical = GATE_FLOOR
        self._off = 0  # outliers since the last good sample

    @property
    def typical_error(self) -> float:
        """Relative, of recent predictions."""
        return self._typical

    def ms(self, features: tuple[float, ...]) -> float:
        return sum(k * x for k, x in zip(self.coefficients, features, strict=True))

    def observe(self, features: tuple[float, ...], ms: float) -> bool:
        """Learn that `features` took `ms`; False when it was left out as an outlier.

        Nothing can be learnt from times <= 0: they are left out.
        """
        if ms <= 0:
            return False
        expected = max(self.ms(features), FLOOR_MS)
        error = (ms - expected) / min(expected, ms)  # symmetric: half and double are equally far
        size = abs(error)
        if not self._covariance and self.evidence >= WARM_UP:
            # Calibrated, or well known to a peer: a cold start must not bend it, many samples in a row may.
            self._begin(self._reach, self.ms(self._reach))
            self._warming = 0
        if self._warming == WARM_UP:
            # Another machine than the prior's is first of all faster or slower as a whole.
            self.coefficients = [k * ms / expected for k in self.coefficients]
            self._begin(features, ms)
            self.evidence = 0  # all rests on this sample now
            size = GATE_FLOOR
        elif self._warming == 0 and size > max(GATE * self._typical, GATE_FLOOR):
            self.outliers += 1
            self._off += 1
            if self._off >= WARM_UP:
                self._warming = WARM_UP  # a change, not outliers: start anew from the next sample
                self._off = 0
            return False
        self._warming = max(self._warming - 1, 0)
        self._off = 0
        self._typical += TYPICAL_RATE * (min(size, 1.0) - self._typical)
        # Weighting by the larger of both keeps one long sample from dominating a short prediction.
        scale = max(expected, ms)
        self._update([x / scale for x in features], (ms - self.ms(features)) / scale)
        self.samples += 1
        self.evidence += 1
        return True

    def _begin(self, features: tuple[float, ...], ms: float) -> None:
        self._covariance = self._spread(features, ms)
        self._most = [row[i] for i, row in enumerate(self._covariance)]

    def _spread(self, features: tuple[float, ...], ms: float) -> list[list[float]]:
        """A covariance under which each term may explain a share of the sample's time, or of the time that
        a sample of `reach` is predicted to take, if that is less."""
        n = len(features)
        spread = [[0.0] * n for _ in range(n)]
        reach_ms = self.ms(self._reach)
        for i, (k, x, far) in enumerate(zip(self.coefficients, features, self._reach, strict=True)):
            share = reach_ms / far if x <= 0 else min(ms / x, reach_ms / far)
            sd = max(k, PRIOR_ERROR * share)
            spread[i][i] = sd * sd
        return spread

    def _update(self, x: list[float], error: float) -> None:
        p = self._covariance
        n = len(x)
        px = [sum(p[i][j] * x[j] for j in range(n)) for i in range(n)]
        noise = min(max(self._typical, 0.01), MOST_NOISE) ** 2
        denominator = noise + sum(x[i] * px[i] for i in range(n))
        for i in range(n):
            self.coefficients[i] += px[i] / denominator * error
        for i in range(n):
            for j in range(n):
                p[i][j] -= px[i] * px[j] / denominator
        self._lift()
        for i, most in enumerate(self._most):
            # Bounded: what no sample tells of gets no more uncertain than it was at first.
            p[i][i] = min(p[i][i] + DRIFT * DRIFT * most, most) if p[i][i] > 0 else DRIFT * DRIFT * most

    def _lift(self) -> None:
        """A negative cost per token is never right, however the samples fall: it is 0, and the others are
        what they are most likely to be then. (To cut it off alone would leave them with its half of a
        correction, and that may drive them away from the truth.)"""
        k = self.coefficients
        if min(k) >= 0:
            return
        n = len(k)
        p = [list(row) for row in self._covariance]
        for _ in range(n):
            i = min(range(n), key=k.__getitem__)
            if k[i] >= 0:
                return
            if p[i][i] > 0:
                gain = [p[j][i] / p[i][i] for j in range(n)]
                below = k[i]
                for j in range(n):
                    k[j] -= gain[j] * below
                row = list(p[i])
                for j in range(n):
                    for m in range(n):
                        p[j][m] -= gain[j] * row[m]
            k[i] = 0.0
        self.coefficients = [max(0.0, value) for value in k]


@dataclass(slots=True)
class PrefillModel:
    """T_prefill of one worker. The prior is 20k tokens/s: use a calibration where there is one."""

    linear: LinearModel = field(default_factory=lambda: LinearModel((1.0, 0.05, 0.0), PREFILL_REACH))

    def ms(self, uncached: int, context: int) -> float:
        """Time to compute the last `uncached` tokens of `context`; 0 for none."""
        if uncached <= 0:
            return 0.0
        a, b, c = self.linear.coefficients
        return a + b * uncached + c * uncached * (context - 0.5 * uncached)

    def observe(self, uncached: int, context: int, ms: float) -> bool:
        if uncached <= 0:
            return False
        return self.linear.observe((1.0, float(uncached), uncached * (context - 0.5 * uncached)), ms)

    @property
    def ms_per_token(self) -> float:
        """Of work whose shape is unknown; what lies behind a load report's count."""
        return self.ms(1024, 1024) / 1024


@dataclass(slots=True)
class StepModel:
    """T_step of one decode worker, which is the ITL of everyone in its batch."""

    linear: LinearModel = field(default_factory=lambda: LinearModel((10.0, 0.1, 1e-5), STEP_REACH))

    def ms(self, batch: int, kv_tokens: int) -> float:
        d, e, f = self.linear.coefficients
        return d + e * batch + f * kv_tokens

    def observe(self, batch: int, kv_tokens: int, ms: float) -> bool:
        if batch <= 0:
            return False
        return self.linear.observe((1.0, float(batch), float(kv_tokens)), ms)


@dataclass(slots=True)
class MoveModel:
    """Moving KV between workers. The prior is 128 KiB per token at 25 GB/s."""

    linear: LinearModel = field(default_factory=lambda: LinearModel((1.0, 0.005), MOVE_REACH))

    def ms(self, tokens: int) -> float:
        """0 for nothing to move."""
        if tokens <= 0:
            return 0.0
        g, h = self.linear.coefficients
        return g + h * tokens

    def observe(self, tokens: int, ms: float) -> bool:
        return tokens > 0 and self.linear.observe((1.0, float(tokens)), ms)


@dataclass(slots=True)
class WorkerModels:
    """The three models of one worker."""

    prefill: PrefillModel = field(default_factory=PrefillModel)
    step: StepModel = field(default_factory=StepModel)
    move: MoveModel = field(default_factory=MoveModel)

    @classmethod
    def from_priors(
        cls,
        prefill: tuple[float, float, float] = (1.0, 0.05, 0.0),
        step: tuple[float, float, float] = (10.0, 0.1, 1e-5),
        move: tuple[float, float] = (1.0, 0.005),
        evidence: int = 0,
        spreads: tuple[float, float] = (GATE_FLOOR, GATE_FLOOR),
    ) -> WorkerModels:
        """From calibrated (a, b, c), (d, e, f) and (g, h). `evidence`: the samples behind each of the first
        two; `spreads`: their relative errors."""
        models = cls(
            PrefillModel(LinearModel(prefill, PREFILL_REACH)),
            StepModel(LinearModel(step, STEP_REACH)),
            MoveModel(LinearModel(move, MOVE_REACH)),
        )
        for linear, spread in zip(models._linears(), spreads, strict=False):
            linear.evidence = evidence
            linear._typical = max(spread, GATE_FLOOR / 2)
        return models

    @property
    def samples(self) -> int:
        return sum(linear.samples for linear in self._linears())

    def learn_from(self, other: WorkerModels) -> None:
        """Start from what `other` knows by now, where it has samples and this one has none."""
        for mine, theirs in zip(self._linears(), other._linears(), strict=True):
            if theirs.samples and not mine.samples:
                mine.coefficients = list(theirs.coefficients)
                mine.evidence = theirs.evidence

    def _linears(self) -> tuple[LinearModel, LinearModel, LinearModel]:
        return self.prefill.linear, self.step.linear, self.move.linear
