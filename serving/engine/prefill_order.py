"""When a prompt is due: the order in which this engine computes its prompts. Pure.

The time of its own that a deadline counts (kvrouter.deadline) is predicted by a model that learns from this
engine's steps. `Work.priority` sets the slack:

    slack = SLACK_MS / 2^priority        0: the usual; higher is sooner, below 0 later

which stays above 0, so that nobody is due before it arrived: what arrives once a prompt is due never
overtakes it, whatever its priority. Under Order.FIFO priorities change nothing.
"""

from __future__ import annotations

from kvrouter.deadline import SLACK_MS, Order, due_s
from kvrouter.perf_model import PrefillModel
from serving.engine.sequence import StepPlan

FEWEST_SAMPLES = 8  # before these the prior predicts: an engine's first steps are slow as no other
MOST_DECODES = 1 / 8  # per prompt token of a step; beyond that its time tells of decodes
LATEST, SOONEST = -5, 10  # priorities beyond mean the same: 64 s and 2 ms of slack


class PrefillOrder:
    """`due_s` when a prompt arrives, `learn` after each step with prompts."""

    def __init__(self, order: Order, chunk_tokens: int, model: PrefillModel | None = None) -> None:
        """`model`: a calibration to start from; it is taken over."""
        self._order = order
        self._chunk_tokens = chunk_tokens
        self._model = model or PrefillModel()
        self._prior = tuple(self._model.linear.coefficients)

    def due_s(self, priority: int, uncached: int, context: int, arrived_s: float) -> float:
        """Sort key of a prompt of `context` tokens of which `uncached` are to be computed; 0: none here."""
        slack_ms = SLACK_MS / 2.0 ** min(max(priority, LATEST), SOONEST)
        return due_s(self._order, arrived_s, self.predict_ms(uncached, context), slack_ms)

    def predict_ms(self, uncached: int, context: int) -> float:
        """Computing the last `uncached` tokens of `context`, alone and in full chunks."""
        if uncached <= 0:
            return 0.0
        linear = self._model.linear
        a, b, c = linear.coefficients if linear.samples >= FEWEST_SAMPLES else self._prior
        n_steps = -(-uncached // self._chunk_tokens)
        return a * n_steps + b * uncached + c * uncached * (context - 0.5 * uncached)

    def learn(self, plan: StepPlan, ms: float) -> None:
        """`plan` took `ms`. Times of 0, steps without prompts and those of mostly decodes teach nothing."""
        n_tokens = sum(piece.count for piece in plan.prefills)
        if not n_tokens or len(plan.decodes) > MOST_DECODES * n_tokens:
            return
        # Chunks add up: those of one prompt have together the third feature of the whole.
        pairs = sum(piece.count * (piece.start + 0.5 * piece.count) for piece in plan.prefills)
        self._model.linear.observe((1.0, float(n_tokens), pairs), ms)
