"""The live router: any policy over the caches, the loads and the time models. Pure.

    match    cached prefixes by worker: from events, and from prompts that still compute
    decode   workers with KV room -> policy's decode score -> pick
    prefill  policy's filter -> score -> pick
    local    or on the decode worker itself, if that costs all clients together less

Without prefill workers, decode workers compute their prompts themselves and the prefill score places them.
In a rollout workers may differ in the layout of their KV: then all of this is done for each layout, among
its own workers, and the predicted time of the whole answer decides (kvrouter/layouts.py).
Several routers share the workers without talking to each other: own bookings count at once, reports tell of
the others' (kvrouter.load), and ties fall differently by seed.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvrouter.candidates import candidates, decode_candidates
from kvrouter.cost import Candidate, Demand, Terms, local_terms, pick, with_room
from kvrouter.deadline import Order
from kvrouter.events import CacheEvents
from kvrouter.hashing import block_hashes
from kvrouter.layouts import Placing, best_of, by_layout, held_by, of_layout, settled
from kvrouter.load import Booking, WorkerLoad
from kvrouter.pending_prefixes import PendingPrefixes
from kvrouter.perf_model import WorkerModels
from kvrouter.policies.policy import Policy
from kvrouter.policies.registry import make_policy
from kvrouter.router import Choice, LoadLike, RouterRequest, WorkerView
from kvrouter.turnover import CacheTurnover
from serving.errors import NoWorker

__all__ = ["EXPECTED_OUTPUT_TOKENS", "PolicyRouter", "build_router"]

EXPECTED_OUTPUT_TOKENS = 256  # of a request without a small max_tokens
SESSIONS = 65_536  # remembered; the oldest are forgotten
TAIL_TOKENS = 2048  # of a streamed hand-off, what still moves when the prompt is computed


class PolicyRouter:
    """See the module docstring; implements `kvrouter.router.Router`."""

    def __init__(
        self,
        policy: Policy,
        *,
        caches: CacheEvents,
        models: Callable[[], WorkerModels],
        order: Order,
        seed: int,
        pull: bool,
        local: bool,
        frontends: int,
    ) -> None:
        self.policy = policy
        self.caches = caches
        self._models = models
        self._order = order
        self._random = random.Random(seed)
        self._pull = pull
        self._local = local
        self._frontends = frontends
        self._loads: dict[str, WorkerLoad] = {}
        self._mixed = False  # some workers cannot read others' KV
        self._attempts: dict[int, str] = {}  # attempt -> worker
        self._pending = PendingPrefixes()
        self._turnovers = {role: CacheTurnover() for role in ("prefill", "decode")}
        self._sessions: OrderedDict[str, str] = OrderedDict()  # session -> worker that computed last

    # ------------------------------------------------------------ workers

    def add_worker(self, worker: WorkerView) -> None:
        """A worker that is known keeps its bookings. A new one is taken to be as fast as its peers."""
        self.caches.add_worker(worker.ident, worker.total_blocks)
        for role, turnover in self._turnovers.items():
            if role == worker.role:
                turnover.add_worker(worker.ident, worker.total_blocks * worker.block_tokens)
            else:
                turnover.remove_worker(worker.ident)
        known = self._loads.get(worker.ident)
        if known is not None:
            known.view = worker
        else:
            models = self._models()
            peers = [load for load in self._loads.values() if load.view.role == worker.role]
            if peers:
                models.learn_from(max(peers, key=lambda load: load.models.samples).models)
            self._loads[worker.ident] = WorkerLoad(worker, models, self._order, self._frontends)
        self._mixed = len(by_layout(self._loads.values())) > 1

    def remove_worker(self, ident: str) -> None:
        load = self._loads.pop(ident, None)
        self._mixed = self._mixed and len(by_layout(self._loads.values())) > 1
        for attempt in load.bookings if load is not None else ():
            del self._attempts[attempt]
            self._pending.drop(attempt)
        self.caches.remove_worker(ident)
        for turnover in self._turnovers.values():
            turnover.remove_worker(ident)

    def set_frontends(self, count: int) -> None:
        """How many routers place on these workers, this one included."""
        self._frontends = max(count, 1)
        for load in self._loads.values():
            load.frontends = self._frontends

    def load_of(self, ident: str) -> WorkerLoad:
        """Raises KeyError for a worker that is not there."""
        return self._loads[ident]

    def models(self) -> list[WorkerModels]:
        """The time models of all workers."""
        return [load.models for load in self._loads.values()]

    def loads(self) -> list[WorkerLoad]:
        return list(self._loads.values())

    # ------------------------------------------------------------ choosing

    def choose(self, request: RouterRequest, now_s: float, *, look: bool = False) -> Choice:
        decoders = self._able("decode", request, self._loads.values())
        if not decoders:
            raise NoWorker("no decode worker can take the request")
        if self._mixed:
            placing = self._among_layouts(request, decoders, now_s)
        else:
            if request.hashes is None:
                request.hashes = self._hashes(request, decoders)
            prefillers = self._able("prefill", request, self._loads.values()) if request.handoff else []
            stored = self.caches.match(request.hashes)
            placing = self._place(request, stored, decoders, prefillers, now_s)
        if not look:
            for candidate in placing.picked:
                self.policy.chosen(candidate)
        request.choice = placing.choice()
        return request.choice

    def choose_decode(self, request: RouterRequest, source: str, now_s: float) -> Choice:
        """See Router."""
        owner = self._loads.get(source) if request.handoff else None
        alike = of_layout(owner.view.layout, self._loads.values()) if owner is not None else []
        decoders = [load for load in self._able("decode", request, alike) if not load.view.draining]
        decoders = [load for load in decoders if load.view.ident != source]
        if not decoders:
            raise NoWorker("no other decode worker can take the request")
        demand = self._demand(request)
        request.hashes = self._hashes(request, decoders)
        decode, terms = self._decode_on(demand, decoders, self.caches.match(request.hashes))
        self.policy.chosen(decode)
        request.choice = Choice(
            decode=decode.ident, prefill=source, predicted_itl_ms=decode.itl_ms, reasons=terms
        )
        return request.choice

    def _among_layouts(self, request: RouterRequest, decoders: list[WorkerLoad], now_s: float) -> Placing:
        placings = []
        for layout, able in by_layout(decoders).items():
            alike = of_layout(layout, self._loads.values())
            prefillers = settled(alike, request.avoid) if request.handoff else []
            request.hashes = self._hashes(request, able)
            stored = held_by(alike, self.caches.match(request.hashes))
            placing = self._place(request, stored, able, prefillers, now_s)
            placing.hashes = request.hashes
            placings.append(placing)
        best = best_of(placings, self._random)
        request.hashes = best.hashes
        return best

    def _place(
        self,
        request: RouterRequest,
        stored: Mapping[str, int],
        decoders: list[WorkerLoad],
        prefillers: list[WorkerLoad],
        now_s: float,
    ) -> Placing:
        """On workers of one layout; `stored` by such ones, of `request.hashes`."""
        assert request.hashes is not None
        demand = self._demand(request)
        if self._pull and stored:
            demand.lender = max(stored.items(), key=lambda entry: entry[1])
        matched = self._match(stored, request.hashes)
        if prefillers:
            return self._separate(demand, decoders, prefillers, matched, now_s)
        return self._together(demand, decoders, matched, now_s)

    def _demand(self, request: RouterRequest) -> Demand:
        return Demand(
            prompt_tokens=len(request.tokens),
            output_tokens=min(request.max_tokens, EXPECTED_OUTPUT_TOKENS),
            session_worker=None if request.session is None else self._sessions.get(request.session),
            waited_s=request.waited_s,
        )

    def _hashes(self, request: RouterRequest, workers: Sequence[WorkerLoad]) -> Sequence[int]:
        """Of blocks as `workers`, of one layout, have them."""
        return block_hashes(request.tokens, workers[0].view.block_tokens, request.namespace)

    def _decode_on(
        self, demand: Demand, decoders: list[WorkerLoad], matched: Mapping[str, int]
    ) -> tuple[Candidate, dict[str, Terms]]:
        able = with_room(decode_candidates(demand, decoders, matched))
        scores = [self.policy.score_decode(demand, c) for c in able]
        decode, _ = pick(able, [terms["total"] for terms in scores], self._random)
        return decode, {c.ident: terms for c, terms in zip(able, scores, strict=True)}

    def _together(
        self, demand: Demand, loads: list[WorkerLoad], matched: Mapping[str, int], now_s: float
    ) -> Placing:
        """Prefill and decode on one worker."""
        able = with_room(self._candidates(demand, loads, matched, now_s))
        chosen, reasons = self._compute_on(demand, able)
        return Placing(demand, chosen, chosen, reasons)

    def _separate(
        self,
        demand: Demand,
        decoders: list[WorkerLoad],
        prefillers: list[WorkerLoad],
        matched: Mapping[str, int],
        now_s: float,
    ) -> Placing:
        decode, decode_terms = self._decode_on(demand, decoders, matched)
        able_to_compute = self._candidates(demand, prefillers, matched, now_s)
        chosen, reasons = self._compute_on(demand, able_to_compute)
        reasons |= decode_terms
        load = self._loads[decode.ident]
        missing = demand.prompt_tokens - decode.cached_tokens
        move_ms = load.models.move.ms(min(missing, TAIL_TOKENS))
        if self._local and self.policy.weighs_local:
            alone = self._candidates(demand, [load], matched, now_s)[0]
            local = local_terms(alone, load.in_flight)
            remote_ms = chosen.ttft_ms + move_ms
            reasons[decode.ident] |= {"local_ms": local["total"], "remote_ms": remote_ms}
            if local["total"] < remote_ms:
                return Placing(demand, decode, alone, reasons)
        return Placing(demand, decode, chosen, reasons, move_ms)

    def _compute_on(self, demand: Demand, able: Sequence[Candidate]) -> tuple[Candidate, dict[str, Terms]]:
        """Who computes the prompt, and the terms of all that were compared."""
        best = min(able, key=lambda c: c.prefill_ms)
        demand.best_cached_tokens, demand.best_prefill_ms = best.cached_tokens, best.prefill_ms
        kept = self.policy.keep(demand, able, self._random)
        scores = [self.policy.score(demand, candidate) for candidate in kept]
        chosen, _ = pick(kept, [terms["total"] for terms in scores], self._random)
        return chosen, {c.ident: terms for c, terms in zip(kept, scores, strict=True)}

    def _candidates(
        self, demand: Demand, loads: list[WorkerLoad], matched: Mapping[str, int], now_s: float
    ) -> list[Candidate]:
        turnover = self._turnovers[loads[0].view.role]
        return candidates(demand, loads, matched, turnover, now_s)

    def _able(self, role: str, request: RouterRequest, among: Iterable[WorkerLoad]) -> list[WorkerLoad]:
        """The workers of a role: those to avoid only when all are, draining ones only without others."""
        pool = [w for w in among if w.view.role == role]
        able = [w for w in pool if not w.view.draining] or pool
        return [w for w in able if w.view.ident not in request.avoid] or able

    def _match(self, stored: Mapping[str, int], hashes: Sequence[int]) -> Mapping[str, int]:
        if not self.policy.sees_pending:
            return stored
        matched = dict(stored)
        for worker, blocks in self._pending.match(hashes).items():
            if blocks > matched.get(worker, 0):
                matched[worker] = blocks
        return matched

    # ------------------------------------------------------------ bookings

    def book(self, attempt: int, worker: str, request: RouterRequest, now_s: float) -> None:
        load = self._loads.get(worker)
        if load is None:
            return
        choice = request.choice
        local = load.view.role == "decode" and (choice is None or choice.prefill is None)
        computes = local or load.view.role == "prefill"
        prompt = len(request.tokens)
        cached = choice.cached_tokens + choice.pull_tokens if choice is not None else 0
        uncached = max(prompt - cached, 1)
        prefill_ms = load.models.prefill.ms(uncached, prompt) if computes else 0.0
        if computes and choice is not None and choice.pull_from is not None:
            prefill_ms += load.models.move.ms(choice.pull_tokens)
        output = 0 if load.view.role == "prefill" else min(request.max_tokens, EXPECTED_OUTPUT_TOKENS)
        stored = 0
        if computes and request.hashes:
            stored = self.caches.match(request.hashes).get(worker, 0) * load.view.block_tokens
        load.book(
            Booking(
                attempt=attempt,
                computes=computes,
                prompt_tokens=prompt,
                uncached_tokens=uncached,
                prefill_ms=prefill_ms,
                output_tokens=output,
                blocks=-(-(prompt + output) // load.view.block_tokens),
                booked_s=now_s,
                counted_tokens=max(prompt - stored, 1),
                limit_s=request.limit_s,
                waited_s=request.waited_s,
            ),
            now_s,
        )
        self._attempts[attempt] = worker
        if computes:
            self._turnovers[load.view.role].write(worker, uncached)
            if request.hashes:
                self._pending.add(attempt, worker, request.hashes)
                known = cached // load.view.block_tokens
                self.caches.placed(worker, request.hashes, known, now_s)
            if request.session is not None:
                self._remember(request.session, worker)

    def _remember(self, session: str, worker: str) -> None:
        self._sessions[session] = worker
        self._sessions.move_to_end(session)
        if len(self._sessions) > SESSIONS:
            self._sessions.popitem(last=False)

    def begun(self, attempt: int, cached_tokens: int, now_s: float) -> None:
        worker = self._attempts.get(attempt)
        if worker is not None:
            self._loads[worker].begun(attempt, cached_tokens, now_s)

    def computed(self, attempt: int, now_s: float) -> None:
        worker = self._attempts.get(attempt)
        if worker is not None:
            load = self._loads[worker]
            load.computed(attempt, now_s)
            self._pending.drop(attempt)  # the events that tell of its blocks came before
            if load.models.prefill.linear.samples == 1:
                self._teach_peers(load)

    def _teach_peers(self, load: WorkerLoad) -> None:
        """Its first sample. Peers without one are taken to be as fast: if they were still taken to be slow,
        they would get nothing to do and never show what they can."""
        for peer in self._loads.values():
            if peer.view.role == load.view.role and peer is not load:
                peer.models.learn_from(load.models)

    def progress(self, attempt: int, tokens: int) -> None:
        worker = self._attempts.get(attempt)
        if worker is not None:
            self._loads[worker].settle(attempt)
            self._pending.drop(attempt)

    def release(self, attempt: int) -> None:
        worker = self._attempts.pop(attempt, None)
        if worker is not None:
            self._loads[worker].release(attempt)
            self._pending.drop(attempt)

    @property
    def in_flight(self) -> int:
        return len(self._attempts)

    def until_computed_ms(self, attempt: int, now_s: float) -> float | None:
        worker = self._attempts.get(attempt)
        return None if worker is None else self._loads[worker].until_computed_ms(attempt, now_s)

    def can_spare(self, worker: str) -> bool:
        leaving = self._loads.get(worker)
        return leaving is not None and any(
            load.view.role == leaving.view.role and not load.view.draining
            for load in self._loads.values()
            if load is not leaving
        )

    def is_uneven(self, by_ms: float, now_s: float) -> bool:
        least: dict[str, float] = {}
        most: dict[str, float] = {}
        for load in self._loads.values():
            role, backlog_ms = load.view.role, load.backlog_ms(now_s)
            least[role] = min(backlog_ms, least.get(role, backlog_ms))
            most[role] = max(backlog_ms, most.get(role, backlog_ms))
        return any(most[role] - least[role] >= by_ms for role in most)

    # ------------------------------------------------------------ what workers say

    def on_load(self, ident: str, report: LoadLike, now_s: float) -> None:
        load = self._loads.get(ident)
        if load is not None:
            load.report(report, now_s)
            if load.models.step.linear.samples == 1:
                self._teach_peers(load)

    def told(self, ident: str, attempt: int, uncached_tokens: int, now_s: float) -> None:
        load = self._loads.get(ident)
        if load is not None:
            load.told(attempt, uncached_tokens, now_s)

    def on_events(self, ident: str, epoch: int, events: object) -> bool:
        return self.caches.apply(ident, epoch, events)

    def on_snapshot(self, ident: str, epoch: int, message: object) -> bool:
        """False: ask for another one."""
        return self.caches.snapshot(ident, epoch, message)

    def sweep(self, now_s: float) -> list[str]:
        """Call about once a second. Workers that turned out to send no events since the last call."""
        return self.caches.sweep(now_s)


def build_router(
    policy: str = "ttft_regret",
    *,
    regret_weight: float = 1.0,
    seed: int = 0,
    caches: CacheEvents | None = None,
    models: Callable[[], WorkerModels] = WorkerModels,
    order: Order = Order.DEADLINE,
    pull: bool = False,
    local: bool = True,
    frontends: int = 1,
) -> PolicyRouter:
    """A router of one variant on one frontend.

    Args:
        policy: a name of `kvrouter.policies.registry.POLICY_NAMES`; another one is a ConfigError.
        seed: of tie breaks; give each frontend its own.
        caches: one of this router's own, by default fed by `on_events` and `on_snapshot`.
        models: makes the priors of a new worker: calibrated ones where there are.
        order: the one the workers really use.
        pull: engines can read a cached prefix from a peer before they compute the rest.
        local: decode workers may compute prompts themselves when that is predicted to cost less.
        frontends: how many routers place on the same workers, this one included.
    """
    return PolicyRouter(
        make_policy(policy, regret_weight=regret_weight),
        caches=CacheEvents() if caches is None else caches,
        models=models,
        order=order,
        seed=seed,
        pull=pull,
        local=local,
        frontends=frontends,
    )
