"""Moves, cancels, hanging reads and broken links in any order, between whole workers: no token is drawn
twice, none is lost but with the link that a confirmation was on, and nothing stays held."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import pytest

from serving.engine.base import SamplingParams
from tests.unit.handoff_fakes import until
from tests.unit.migration_rig import Rig, Row, Worker, prompt

N_REQUESTS, N_EVENTS = 6, 60
PARAMS = SamplingParams(max_tokens=120, seed=5, temperature=1.0, ignore_eos=True, logprobs=1)


@dataclass
class Request:
    """What a frontend knows of one: the attempts that drew its tokens, and the move under way."""

    way: list[tuple[Worker, int]]
    target: tuple[Worker, int] | None = None
    cancelled: bool = False
    lost: bool = False  # neither side goes on with it: a frontend would compute it again
    tried: list[int] = field(default_factory=list)  # sources of targets that failed or were dropped

    def look(self, rig: Rig) -> None:
        """Take in what the workers said."""
        ended = rig.frontend.ended
        if self.target is not None and self.target[1] in ended:
            (end,) = ended[self.target[1]]
            if end.error is not None:
                self.tried.append(self.way[-1][1])
                self.target = None
        if self.target is not None and self.way[-1][1] in ended:
            if rig.frontend.outcome(self.way[-1][1]) == "moved":
                self.way.append(self.target)
            else:
                rig.cancel(*self.target)
            self.target = None
        if self.target is None and self.way[-1][1] in ended:  # the two sides' words come in any order
            (end,) = ended[self.way[-1][1]]
            # It moved to a target that did not go on, and the next was asked for before that was known.
            vain = end.error is not None and len(self.way) > 1 and self.way[-2][1] in self.tried
            self.lost = self.lost or vain or rig.frontend.outcome(self.way[-1][1]) == "moved"

    def over(self, rig: Rig) -> bool:
        self.look(rig)
        return (
            self.cancelled or self.lost or (self.target is None and self.way[-1][1] in rig.frontend.ended)
        )


@pytest.mark.parametrize("seed", range(12))
async def test_any_order_of_events(seed: int) -> None:
    rng = random.Random(seed)
    prompts = [prompt(rng.randint(3, 60), salt=i) for i in range(N_REQUESTS)]
    async with Rig(1) as rig:
        unmoved = [await rig.reference(text, PARAMS) for text in prompts]
    names = iter(range(1000, 10_000))
    async with Rig(3, step_ms=1) as rig:
        for worker in rig.workers:
            worker.host.moves._pause_s = 0.1
        requests = []
        for text in prompts:
            worker, attempt = rng.choice(rig.workers), next(names)
            rig.start(worker, attempt, text, PARAMS)
            requests.append(Request([(worker, attempt)]))
        for _ in range(N_EVENTS):
            request = rng.choice(requests)
            request.look(rig)
            worker = rng.choice(rig.workers)
            match rng.choice(["move"] * 5 + ["hang", "flow", "flow", "cut", "drop", "cancel"]):
                case "move" if request.target is None and not request.over(rig):
                    if worker is not request.way[-1][0]:
                        new = next(names)
                        known = [row for _, a in request.way for row in rig.frontend.rows.get(a, [])]
                        text = prompts[requests.index(request)]
                        rig.ask_to_move(request.way[-1], (worker, new), text, known, params=PARAMS)
                        request.target = worker, new
                case "hang" | "flow" as event:
                    worker.local.faults.hang = event == "hang"
                case "cut":
                    worker.cut_peers()
                case "drop" if request.target is not None:
                    rig.cancel(*request.target)
                    await drop(rig, request)
                case "cancel" if rng.random() < 0.2 and not request.over(rig):
                    request.cancelled = True
                    for end in [request.way[-1], *([request.target] if request.target else [])]:
                        rig.cancel(*end)
            await asyncio.sleep(rng.choice([0, 0.001, 0.004]))
        for worker in rig.workers:
            worker.local.faults.hang = False
        await until(lambda: all(request.over(rig) for request in requests), 20)
        for request, expected in zip(requests, unmoved, strict=True):
            rows: list[Row] = rig.frontend.stream(*(attempt for _, attempt in request.way))
            whole = not request.cancelled and not request.lost
            assert rows == (expected if whole else expected[: len(rows)])
            assert all(len(ends) == 1 for ends in rig.frontend.ended.values())


async def drop(rig: Rig, request: Request) -> None:
    """The target is told to forget it: it may be late. Then the source has told so, or will not move it."""
    assert request.target is not None
    target, new = request.target
    source, attempt = request.way[-1]
    await until(lambda: new not in target.host._owners)
    await until(lambda: attempt not in source.host.moves._moves)
    request.target = None
    request.tried.append(attempt)
    if attempt in rig.frontend.ended and rig.frontend.outcome(attempt) == "moved":
        request.way.append((target, new))
        request.lost = True
