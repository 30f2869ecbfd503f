"""The coordinator against scripted workers in every order of events that hypothesis can think of.

Messages of one link arrive in order, those of different links in any order; links break with what is on
them. Whatever happens: a client gets its tokens in order, none twice and none left out, and one end; and
nothing is left on any worker.
"""

from __future__ import annotations

from array import array

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvrouter.policy_router import build_router
from kvrouter.router import WorkerView
from serving.coordinator import MAX_TRIES
from serving.engine.base import Mode, SamplingParams
from serving.errors import NoWorker, Overloaded
from serving.generation import GenerationRequest
from serving.moving import MOVED
from serving.run import Run, WorkerEntry
from serving.wire import STEP, Begun, Cancel, Step, Submit, unpack_u32
from tests.fuzzing import fuzzed
from tests.unit.coordinator_rig import coordinator_over
from tests.unit.scripted_workers import Client, Held, ScriptedWorker, pick

MAX_INFLIGHT = 6
SWEEP_S = 0.25
ROLES = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode", "d2": "decode"}
places = st.integers(0, 59)  # in whatever there is to choose from
TROUBLES = ["link", "process", "attempt", "attempt", "step", "request", "time"]


class CoordinatorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.router = build_router("least_tokens", local=False)
        self.entries: dict[str, WorkerEntry] = {}
        self.coordinator = coordinator_over(
            self.router, self.entries, lambda: self.now, max_inflight=MAX_INFLIGHT
        )
        self.workers: dict[str, ScriptedWorker] = {}
        self.clients: list[Client] = []
        self.faults = 0

    # Hypothesis leaves whole rules out of most of its runs, so what every run needs is in few of them.

    @initialize(
        prefill=st.integers(0, 2),
        decode=st.sampled_from([1, 2, 3, 3, 3]),
        first=st.lists(st.sampled_from([1, 2, 8, 30, 30, 30]), min_size=2, max_size=4),
    )
    def begin(self, prefill: int, decode: int, first: list[int]) -> None:
        for ident, role in ROLES.items():
            count = prefill if role == "prefill" else decode
            worker = ScriptedWorker(ident, WorkerEntry(ident, 1, f"host:{ident}", lambda message: None))
            worker.entry.send = worker.inbox.append
            worker.linked = False
            self.workers[ident] = worker
            if int(ident[1]) < count:
                self.link(worker)
        for max_tokens in first:
            self.ask(max_tokens)

    # ------------------------------------------------------------ links and membership

    def link(self, worker: ScriptedWorker) -> None:
        worker.linked = True
        self.entries[worker.ident] = worker.entry
        self.show(worker)

    def show(self, worker: ScriptedWorker) -> None:
        self.router.add_worker(
            WorkerView(worker.ident, ROLES[worker.ident], 32, 100, 64, draining=worker.draining)
        )

    @precondition(lambda self: len(self.entries) < len(ROLES))
    @rule(which=places)
    def comes_back(self, which: int) -> None:
        self.link(pick([w for w in self.workers.values() if not w.linked], which))

    def drain(self, name: str, on: bool) -> None:
        worker = self.workers[name]
        worker.draining = on
        if worker.linked:
            self.show(worker)

    def move(self) -> None:
        """As every sweep of a leaving worker does."""
        for worker in self.workers.values():
            if worker.draining and worker.linked:
                attempts = [a for run in self.live() for a in run.attempts.values()]
                there = sum(attempt.worker == worker.ident for attempt in attempts)
                assert self.coordinator.move_from(worker.ident) == there

    # ------------------------------------------------------------ clients

    @rule(
        max_tokens=st.sampled_from([1, 2, 3, 8, 30, 30, 30]),
        stops_at=st.sampled_from([None, None, 1, 2, 5, 20]),
        hangs_up_at=st.sampled_from([None, None, None, 1, 6]),
    )
    def asks(self, max_tokens: int, stops_at: int | None, hangs_up_at: int | None) -> None:
        self.ask(max_tokens, stops_at, hangs_up_at)

    def ask(self, max_tokens: int, stops_at: int | None = None, hangs_up_at: int | None = None) -> None:
        client = Client(len(self.clients) + 1, max_tokens, stops_at, hangs_up_at)
        request = GenerationRequest(
            f"r{client.number}",
            "m",
            array("I", [client.number, 2, 3]),
            SamplingParams(max_tokens=max_tokens, seed=1, temperature=0.0),
        )
        try:
            client.run = self.coordinator.start(request, client)
        except NoWorker:
            assert not any(ROLES[w] == "decode" for w in self.entries)
        except Overloaded:
            assert self.coordinator.in_flight == MAX_INFLIGHT
        else:
            self.clients.append(client)

    @precondition(lambda self: self.live())
    @rule(which=places)
    def hangs_up(self, which: int) -> None:
        client = pick([client for client in self.clients if not client.over], which)
        client.cancelled = True
        assert client.run is not None
        client.run.cancel()
        client.run.cancel()

    # ------------------------------------------------------------ what workers do

    @precondition(lambda self: self.with_inbox())
    @rule(which=places, count=st.integers(1, 4))
    def takes(self, which: int, count: int) -> None:
        """Messages arrive at a worker."""
        self.take(pick(self.with_inbox(), which), count)

    def take(self, worker: ScriptedWorker, count: int) -> None:
        for _ in range(min(count, len(worker.inbox))):
            message = worker.inbox.popleft()
            if isinstance(message, Cancel):
                worker.held.pop(message.attempt, None)  # it may have ended on its own
            elif isinstance(message, Submit):
                tokens = unpack_u32(message.tokens)
                assert message.attempt not in worker.held
                client = self.clients_by_number()[tokens[0]]
                drawn = len(tokens) - message.n_prompt
                assert list(tokens[message.n_prompt :]) == [client.token(i) for i in range(drawn)]
                assert drawn < client.length
                worker.held[message.attempt] = Held(message, client, drawn)

    @precondition(lambda self: self.working())
    @rule(which=places, count=st.integers(1, 8), ends_apart=st.sampled_from([False, False, False, True]))
    def works(self, which: int, count: int, ends_apart: bool) -> None:
        """An attempt goes on: it begins, draws, reads its KV, takes over."""
        worker, held = pick(self.working(), which)
        self.go_on(worker, held, count, ends_apart)

    @precondition(lambda self: self.live())
    @rule(
        rounds=st.integers(1, 3),
        count=st.integers(1, 2),
        late=st.sampled_from([None, *ROLES]),
        leaves=st.sampled_from([None, "p0", "d0", "d1", "d1", "d2"]),
        then=st.sampled_from([None, None, None, None, *TROUBLES]),
        which=places,
    )
    def goes_on(  # noqa: PLR0917 - drawn, not written
        self, rounds: int, count: int, late: str | None, leaves: str | None, then: str | None, which: int
    ) -> None:
        """Everybody works for a while; what `late` says is on its way all that time. `leaves` begins to
        drain, or is taken back."""
        if leaves is not None:
            self.drain(leaves, not self.workers[leaves].draining)
            self.move()
        for _ in range(rounds):
            for worker in self.workers.values():
                self.take(worker, 100)
            for worker, held in self.working():
                if held.attempt in worker.held:
                    self.go_on(worker, held, count, False)
            for worker in self.workers.values():
                if worker.ident != late:
                    self.say(worker, 100)
            self.move()
        if then is not None:
            self.go_wrong(then, which)

    def go_on(self, worker: ScriptedWorker, held: Held, count: int, ends_apart: bool) -> None:
        mode = Mode(held.submit.mode)
        if mode is Mode.DECODE and not held.begun:
            self.read(worker, held)
        elif mode is Mode.PREFILL:
            worker.draw(held, 1, ends_apart)
            held.leased = held.attempt in worker.held
        elif not held.begun and count == 1:
            held.begun = True
            worker.outbox.append(Step(begun=[Begun(held.attempt, 0)]))
        else:
            worker.draw(held, count, ends_apart)

    def read(self, worker: ScriptedWorker, held: Held) -> None:
        """The KV comes from its owner, or the owner refuses."""
        handoff = held.submit.handoff
        assert handoff is not None
        owner = self.workers[handoff.ident]
        source = owner.held.get(handoff.attempt)
        if source is None and any(
            isinstance(m, Submit) and m.attempt == handoff.attempt for m in owner.inbox
        ):
            return  # not there yet
        if handoff.attempt in owner.finished:
            del worker.held[held.attempt]  # it is told that there is nothing to do, and says nothing
        elif source is None:
            worker.end(held.attempt, error="the owner knows nothing of it")
        elif not handoff.live and source.leased:
            del owner.held[source.attempt]
            held.drawn = source.drawn
            held.begun = True
            worker.outbox.append(Step(begun=[Begun(held.attempt, 0)]))
        elif handoff.live and source.begun:
            owner.end(source.attempt, MOVED)
            held.drawn = source.drawn
            held.begun = True
            worker.outbox.append(Step(begun=[Begun(held.attempt, 0)]))

    @precondition(lambda self: self.with_outbox())
    @rule(which=places, count=st.integers(1, 3))
    def says(self, which: int, count: int) -> None:
        """Frames arrive at the frontend."""
        self.say(pick(self.with_outbox(), which), count)

    def say(self, worker: ScriptedWorker, count: int) -> None:
        for _ in range(min(count, len(worker.outbox))):
            self.coordinator.on_step(worker.outbox.popleft())

    def with_inbox(self) -> list[ScriptedWorker]:
        return [worker for worker in self.workers.values() if worker.inbox]

    def with_outbox(self) -> list[ScriptedWorker]:
        return [worker for worker in self.workers.values() if worker.outbox]

    def working(self) -> list[tuple[ScriptedWorker, Held]]:
        return [(w, held) for w in self.workers.values() for held in w.held.values() if not held.leased]

    # ------------------------------------------------------------ time

    @rule(seconds=st.sampled_from([SWEEP_S, SWEEP_S, 1.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.coordinator.sweep()
        self.move()

    # ------------------------------------------------------------ trouble

    @rule(kind=st.sampled_from(TROUBLES), which=places)
    def goes_wrong(self, kind: str, which: int) -> None:
        self.go_wrong(kind, which)

    def go_wrong(self, kind: str, which: int) -> None:
        for client in self.clients:
            client.harmed = True  # all who are in flight may hear of it: retries come out of one budget
        if kind == "time":
            for entry in self.entries.values():
                entry.waiting = pick([None, 0, 3], which)
            self.now += pick([5.1, 10.1, 30.1, 60.1, 600.1], which)
            self.coordinator.sweep()
        elif kind in ("link", "process"):
            if self.entries:
                self.lose(self.workers[pick(sorted(self.entries), which)], dies=kind == "process")
        elif self.working():
            worker, held = pick(self.working(), which)
            held.client.refused |= kind != "attempt"
            worker.end(held.attempt, STEP if kind == "step" else "", "it failed", kind != "request")

    def lose(self, worker: ScriptedWorker, *, dies: bool) -> None:
        worker.linked = False
        worker.inbox.clear()
        worker.outbox.clear()
        # Nobody waits for its attempts any more; what is leased lives on unless the process is gone.
        worker.held = {a: h for a, h in worker.held.items() if h.leased and not dies}
        if dies:
            worker.finished.clear()
        del self.entries[worker.ident]
        self.router.remove_worker(worker.ident)
        self.coordinator.on_worker_lost(worker.ident)

    # ------------------------------------------------------------ what must hold

    def live(self) -> list[Run]:
        return list(self.coordinator._live)

    def clients_by_number(self) -> dict[int, Client]:
        return {client.number: client for client in self.clients}

    @invariant()
    def clients_get_what_they_must(self) -> None:
        for client in self.clients:
            client.check()
            assert client.run is not None
            assert client.run.ended == client.over
        assert self.coordinator.in_flight == sum(not client.over for client in self.clients)

    @invariant()
    def attempts_are_conserved(self) -> None:
        coordinator = self.coordinator
        attempts = {a: run for run in self.live() for a in run.attempts}
        assert coordinator._runs == attempts
        booked = 0
        for run in self.live():
            assert run.tries <= MAX_TRIES
            assert run.next_position == len(run.sent)
            assert not run.pending
            for attempt in run.attempts.values():
                assert attempt.worker in self.entries
                booked += attempt.mode is not Mode.PREFILL or not attempt.computed
            making = {a.ident for a in run.decoding}
            if run.waits_after is not None:
                assert not run.attempts
            elif not making:
                assert run.early  # its last tokens are on their way
            if run.move is not None:
                assert making <= {run.move.source, run.move.target}
                assert run.move.target in making or run.final is not None
            else:
                assert len(making) <= 1
        assert self.router.in_flight == booked
        budget = coordinator._budget
        assert 0.0 <= budget._tokens <= budget._burst

    @invariant()
    def workers_hold_only_what_somebody_waits_for(self) -> None:
        known = self.coordinator._runs
        for worker in self.workers.values():
            taken_back = {m.attempt for m in worker.inbox if isinstance(m, Cancel)}
            submitted = {m.attempt for m in worker.inbox if isinstance(m, Submit)}
            for held in worker.held.values():
                assert held.leased or held.attempt in known or held.attempt in taken_back
            assert submitted <= known.keys() | taken_back

    def teardown(self) -> None:
        """No more trouble: everything comes to its end."""
        if not self.workers:
            return
        for name in self.workers:
            self.drain(name, False)
        for name in ("p0", "d0", "d1"):
            if not self.workers[name].linked:
                self.link(self.workers[name])
        for _ in range(100):
            self.goes_on(1, 8, None, None, None, 0)
            self.now += SWEEP_S
            self.coordinator.sweep()
            self.clients_get_what_they_must()
            self.attempts_are_conserved()
            self.workers_hold_only_what_somebody_waits_for()
            if not self.live() and not any(w.inbox or w.outbox for w in self.workers.values()):
                break
        assert not self.live()
        assert self.router.in_flight == 0
        assert all(client.over for client in self.clients)
        assert [h for w in self.workers.values() for h in w.held.values() if not h.leased] == []


TestCoordinatorMachine = CoordinatorMachine.TestCase
TestCoordinatorMachine.settings = settings(fuzzed(400), stateful_step_count=60)
