"""Who is let in: only those that are predicted to get their first token and their pace. Pure.

A request has one limit for its first token, wherever it is computed:

    limit = ttft_ms + max(ttft_ms_per_1k_tokens * n / 1000, prefill of all n tokens), at most its time-out

The router has chosen workers for it. It is admitted when, as these workers are loaded now,

    ttft   the prompts before it, in the worker's own order, leave it time:  wait + own prefill <= limit
           and those that it overtakes (shorter prompts go first) still meet theirs;
    itl    once its prompt is computed, the decode batch with it in it makes its steps within itl_ms;
    kv     and there is room for it. Sequences that will have ended by then do not count.

Else the router chooses once more, without the workers that lack something, and that choice is judged.

Nothing is held back here: workers serve by deadline, so whoever is admitted is in the right queue already,
and whoever is not gets an answer at once. What stands in an idle queue is refused only when its own work
takes longer than its client's time-out (`timeout`: no worker could do it). Nothing is refused for a
prediction without evidence: a profile, or samples of workers at work.

While requests are being refused, room is kept for those with the better claim. All others may only use
(1 - reserve) of the time or room there is, once for each of:

    share     its tenant has had more than a fair share of GPU time lately
    lane      the lane of its length has (serving.length_lanes)
    priority  somebody of a higher priority asks (counts twice)

A queue is as busy with less in it, so the reserve costs hardly any work done. `retry_after_s` is when this
very request would be let in if nobody else came; see docs/admission.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, log

from kvrouter.deadline import SLACK_MS
from kvrouter.load import WorkerLoad
from kvrouter.router import Choice
from serving.config import AdmissionConfig, Slo, SloTargets
from serving.fair_shares import FairShares
from serving.length_lanes import LengthLanes

__all__ = ["LONGEST_RETRY_S", "TIMEOUT", "Admission", "Again", "Ask", "Verdict"]

FEWEST_SAMPLES = 3  # behind a model, before it may refuse anybody
FIRST_OUTPUT_TOKENS = 256.0  # mean length of an answer, before there was one
OUTPUT_RATE = 0.02  # of the running mean
PRESSURE_RATE = 0.02  # of the running share of refusals, per request
PRESSURE = 0.05  # refused, from which on claims count
DECODE_RESERVE = 0.3  # of the reserve; of a batch it costs throughput
HORIZON = 0.5  # of ttft_ms, that a batch is predicted ahead
FIRST_MARGIN = 1 / 16  # of ttft_ms, for what predictions leave out
MOST_MARGIN = 0.5  # of the time to wait
MARGIN_STEP = 1 / 32
MISSES = 0.005  # of the admitted that may be late
HIGHEST_S = 10.0  # a priority counts as asking for so long
MOST_PRIORITIES = 16  # remembered, before old ones are forgotten
LONGEST_RETRY_S = 600.0
TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class Ask:
    """What a request wants."""

    prompt_tokens: int
    max_tokens: int
    priority: int = 0  # higher goes first
    tenant: str | None = None
    timeout_ms: float | None = None  # the client's own limit for the whole answer
    slo: SloTargets | None = None  # of its class; None: the model's
    min_tokens: int = 1  # of its answer


@dataclass(frozen=True, slots=True)
class Verdict:
    """`reason` None: admitted; else ttft, itl, kv, share, lane, priority or timeout, label values of a
    metric. The last one is for ever."""

    reason: str | None
    lane: int  # index into LANES
    wait_ms: float  # predicted, before its own prefill
    own_ms: float  # prefill
    limit_s: float  # when its first token is to be out
    retry_after_s: float = 0.0
    choice: Choice | None = None  # what it is about
    short: frozenset[str] = frozenset()  # workers that lack what it needs
    least_ms: float = 0.0  # of its answer with nobody else there; of `timeout` only


@dataclass(frozen=True, slots=True)
class _Meets:
    """What a request meets where its prompt would be computed."""

    load: WorkerLoad
    own_ms: float
    due_s: float
    wait_ms: float
    room_ms: float  # that it may wait
    now_s: float


@dataclass(frozen=True, slots=True)
class _Lack:
    reason: str
    worker: str
    wait_s: float  # until it should be gone


Again = Callable[[frozenset[str]], Choice]  # another choice, without these workers where others are left


class Admission:
    """Of one variant on one frontend. Other frontends' work is in the workers' load reports."""

    def __init__(self, slo: Slo, config: AdmissionConfig, load_of: Callable[[str], WorkerLoad]) -> None:
        """`load_of`: the router's view of a worker it has chosen. Unless the mode is `slo`, only the first
        token of `slo` counts."""
        self._slo = slo
        self._config = config
        self._load_of = load_of
        self._tenants: FairShares[str | None] = FairShares()
        self._lanes: FairShares[int] = FairShares()
        self.lengths = LengthLanes()
        self._output_tokens = FIRST_OUTPUT_TOKENS
        self._priorities: dict[int, float] = {}  # who asked when
        self._refused = 0.0  # running share
        self._margin_ms = slo.ttft_ms * FIRST_MARGIN

    def retarget(self, slo: Slo) -> None:
        """Other targets from now on."""
        self._margin_ms *= slo.ttft_ms / self._slo.ttft_ms
        self._slo = slo

    def decide(self, ask: Ask, choice: Choice, now_s: float, again: Again | None = None) -> Verdict:
        """The verdict on `choice` or, where that is refused, on what `again` says if that will do.

        Also remembers what became of it: call it once a request.
        """
        own_ms = self._own_ms(ask, choice)
        lane = self.lengths.offer(own_ms)
        self._tenants.ask(ask.tenant, now_s)
        self._lanes.ask(lane, now_s)
        self._priorities[ask.priority] = now_s
        if len(self._priorities) > MOST_PRIORITIES:
            self._priorities = {p: s for p, s in self._priorities.items() if now_s - s < HIGHEST_S}
        verdict = self.look(ask, choice, now_s, again)
        self._learn_margin(self._load_of(choice.prefill or choice.decode).take_lateness())
        if verdict.reason == TIMEOUT:  # no sign of pressure
            return verdict
        admitted = verdict.reason is None
        self._refused += PRESSURE_RATE * ((not admitted) - self._refused)
        if admitted:
            gpu_ms = verdict.own_ms + self._decode_ms(ask, verdict.choice or choice)
            self._tenants.spend(ask.tenant, gpu_ms, now_s)
            self._lanes.spend(lane, verdict.own_ms, now_s)
        return verdict

    def ended(self, output_tokens: int) -> None:
        """An answer is complete."""
        self._output_tokens += OUTPUT_RATE * (output_tokens - self._output_tokens)

    def look(self, ask: Ask, choice: Choice, now_s: float, again: Again | None = None) -> Verdict:
        """What `decide` would say; changes nothing."""
        limit_ms = self._limit_ms(ask, choice)
        lane = self.lengths.lane(self._own_ms(ask, choice))
        verdict = self._judge(ask, choice, lane, limit_ms, now_s)
        if verdict.reason is None or again is None:
            return verdict
        other = again(verdict.short)
        if (other.prefill, other.decode) == (choice.prefill, choice.decode):
            return verdict
        second = self._judge(ask, other, lane, limit_ms, now_s)
        return second if second.reason is None or verdict.reason == TIMEOUT else verdict

    def _judge(self, ask: Ask, choice: Choice, lane: int, limit_ms: float, now_s: float) -> Verdict:
        """Of one choice."""
        computes = choice.prefill or choice.decode
        load = self._load_of(computes)
        own_ms = self._own_ms(ask, choice)
        due_s = load.due_s(own_ms, now_s)
        wait_ms = load.wait_ms(due_s, now_s)
        meets = _Meets(load, own_ms, due_s, wait_ms, max(limit_ms - own_ms, 0.0), now_s)
        limit_s = now_s + limit_ms / 1e3
        if ask.timeout_ms is not None:
            least_ms = self._least_ms(ask, choice)
            if least_ms > ask.timeout_ms:
                short = frozenset((computes,))
                return Verdict(TIMEOUT, lane, wait_ms, own_ms, limit_s, 0.0, choice, short, least_ms)
        lacks = self._lacks(ask, choice, meets, 1.0)
        claim = None
        if not lacks and self._refused > PRESSURE:
            claim, part = self._claim(ask, lane, now_s)
            lacks = self._lacks(ask, choice, meets, part) if part < 1.0 else []
        if not lacks:
            return Verdict(None, lane, wait_ms, own_ms, limit_s, choice=choice)
        longest = max(lacks, key=lambda lack: lack.wait_s)
        retry_s = min(longest.wait_s, LONGEST_RETRY_S)
        short = frozenset(lack.worker for lack in lacks)
        return Verdict(claim or longest.reason, lane, wait_ms, own_ms, limit_s, retry_s, choice, short)

    # ------------------------------------------------------------ what is missing

    def _lacks(self, ask: Ask, choice: Choice, meets: _Meets, part: float) -> list[_Lack]:
        """Why it would not do with `part` of what there is."""
        lacks = []
        load = meets.load
        if load.models.prefill.linear.evidence >= FEWEST_SAMPLES:
            lack_s = self._ttft_lack_s(meets, part)
            if lack_s is not None:
                lacks.append(_Lack("ttft", load.view.ident, lack_s))
        if ask.max_tokens > 1 and self._config.mode == "slo":
            lack = self._decode_lack(ask, choice, (meets.wait_ms + meets.own_ms) / 1e3, part)
            if lack is not None:
                lacks.append(lack)
        return lacks

    def _ttft_lack_s(self, meets: _Meets, part: float) -> float | None:
        margin_ms = min(self._margin_ms, MOST_MARGIN * meets.room_ms)
        over_ms = meets.wait_ms + margin_ms - part * meets.room_ms
        if meets.wait_ms > 0 and over_ms > 0:
            return over_ms / 1e3
        # Those it overtakes keep the margin, and what is kept for better claims than its own.
        ttft_ms = self._slo.ttft_ms
        kept_ms = self._margin_ms + (1.0 - part) * ttft_ms
        blocked = meets.load.blocked(meets.due_s, meets.own_ms, meets.now_s, kept_ms, ttft_ms - SLACK_MS)
        if blocked is None:
            return None
        # Until they are done, or until a new one would be behind them and may wait for them.
        may_wait_ms = blocked.done_ms - meets.wait_ms + over_ms
        return min(blocked.done_ms, max(blocked.behind_ms, may_wait_ms)) / 1e3

    def _decode_lack(self, ask: Ask, choice: Choice, ready_s: float, part: float) -> _Lack | None:
        """On the decode worker, when the prompt is computed."""
        load = self._load_of(choice.decode)
        batch = load.in_flight
        if batch == 0:
            return None
        size = load.view.block_tokens
        needs = -(-(ask.prompt_tokens + min(ask.max_tokens, round(self._output_tokens))) // size)
        step = load.models.step
        held = load.kv_blocks
        life_s = self._output_tokens * step.ms(batch, held * size) / 1e3
        # Of those that decode some will have ended. Those whose prompts still compute will all be there,
        # and so will some that come after this one: whoever looks far ahead finds their places taken.
        ready_s = min(ready_s, HORIZON * self._slo.ttft_ms / 1e3)
        decoding = load.running / batch
        left = decoding * exp(-ready_s / life_s) + 1.0 - decoding
        part = 1.0 - DECODE_RESERVE * (1.0 - part)
        lacks = []
        if step.linear.evidence >= FEWEST_SAMPLES:
            alone_ms = step.ms(1, needs * size)
            target_ms = (ask.slo or self._slo).itl_ms * self._config.slack
            allowed_ms = part * (target_ms - alone_ms)
            others_ms = step.ms(batch + 1, (held + needs) * size) - alone_ms
            if 0 < allowed_ms < left * others_ms:
                lacks.append(_Lack("itl", choice.decode, _fades_s(allowed_ms / others_ms, left, life_s)))
        room = max(part * load.view.total_blocks - needs, 0.0)
        if left * load.used_blocks > room:
            lacks.append(
                _Lack("kv", choice.decode, _fades_s(max(room, 1.0) / load.used_blocks, left, life_s))
            )
        most = part * load.view.max_batch - 1
        if left * batch > most:
            lacks.append(_Lack("itl", choice.decode, _fades_s(max(most, 0.5) / batch, left, life_s)))
        return max(lacks, key=lambda lack: lack.wait_s, default=None)

    def _learn_margin(self, late_s: list[float]) -> None:
        """Wider at each miss and slowly narrower at others, so that MISSES of what is admitted are late."""
        step_ms = MARGIN_STEP * self._slo.ttft_ms
        for late in late_s:
            self._margin_ms += step_ms if late > 0 else -step_ms * MISSES / (1.0 - MISSES)
        self._margin_ms = min(max(self._margin_ms, 0.0), self._slo.ttft_ms * MOST_MARGIN)

    # ------------------------------------------------------------ claims

    def _claim(self, ask: Ask, lane: int, now_s: float) -> tuple[str, float]:
        """Whose better claim it would have to leave room for, and what part of all it may use."""
        claim, part, kept = "", 1.0, 1.0 - self._config.reserve
        if self._lanes.is_over(lane):
            claim, part = "lane", part * kept
        if self._tenants.is_over(ask.tenant):
            claim, part = "share", part * kept
        if any(p > ask.priority and now_s - s < HIGHEST_S for p, s in self._priorities.items()):
            claim, part = "priority", part * kept * kept
        return claim, part

    # ------------------------------------------------------------ predictions

    def _limit_ms(self, ask: Ask, choice: Choice) -> float:
        """From now until its first token should be out: whatever is cached where, and whoever computes."""
        slo, n = ask.slo or self._slo, ask.prompt_tokens
        whole_ms = self._load_of(choice.prefill or choice.decode).models.prefill.ms(n, n)
        longer_ms = max(slo.ttft_ms_per_1k_tokens * n / 1e3 - whole_ms, 0.0)
        limit_ms = whole_ms + self._config.slack * (slo.ttft_ms + longer_ms)
        return limit_ms if ask.timeout_ms is None else min(limit_ms, ask.timeout_ms)

    def _least_ms(self, ask: Ask, choice: Choice) -> float:
        """What its answer takes on these workers with nobody else there; 0: that is not known."""
        prefill = self._load_of(choice.prefill or choice.decode).models.prefill
        step = self._load_of(choice.decode).models.step
        known = prefill.linear.evidence >= FEWEST_SAMPLES
        least_ms = self._own_ms(ask, choice) if known else 0.0
        if ask.min_tokens > 1 and step.linear.evidence >= FEWEST_SAMPLES:
            least_ms += (ask.min_tokens - 1) * step.ms(1, ask.prompt_tokens)
        return least_ms

    def _own_ms(self, ask: Ask, choice: Choice) -> float:
        models = self._load_of(choice.prefill or choice.decode).models
        known = choice.cached_tokens + choice.pull_tokens
        prefill_ms = models.prefill.ms(max(ask.prompt_tokens - known, 1), ask.prompt_tokens)
        return prefill_ms + models.move.ms(choice.pull_tokens)

    def _decode_ms(self, ask: Ask, choice: Choice) -> float:
        """GPU time of its answer: its part of each step."""
        load = self._load_of(choice.decode)
        batch = load.in_flight + 1
        step_ms = load.models.step.ms(batch, load.kv_blocks * load.view.block_tokens)
        return min(ask.max_tokens, self._output_tokens) * step_ms / batch


def _fades_s(share: float, left: float, life_s: float) -> float:
    """Until `share` of today's decodes are left; `left` of them will be when the prompt is ready."""
    return max(life_s * log(left / share), 0.0)
