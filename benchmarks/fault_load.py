"""Live streams and probes for a fault to happen to.

`slots` streams are kept alive, each slot starting its next one as the last ended, until `ease`. Beside them
short requests go out all the time: what other clients see of the fault.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from benchmarks.fault_app import App
from benchmarks.fault_client import Answer, Ask, Exchange, send
from benchmarks.instrument import Lateness

PROBE_TOKENS = 4
STREAM_S = 90.0  # a stream that did not end by then never will
RAMP_S = 0.4
FIRST_TOKEN_ID, LAST_TOKEN_ID = 100, 40_000


# Of every eight asks (greedy and seeded in turn), who ends by a stop string and who wants logprobs.
STOPPED, NAMED = (3, 6), (1, 4)
STOPS_FROM = 0.6  # of the answer: late enough for a fault to strike before


def random_prompt(numbers: random.Random, n_tokens: int) -> tuple[int, ...]:
    return tuple(numbers.randrange(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(n_tokens))


def stream_asks(
    count: int, *, prompt_tokens: int, max_tokens: int, seed: int = 1, named_tokens: bool = False
) -> list[Ask]:
    """Greedy and seeded in turn; lengths vary by a fifth, so that not all end at once."""
    numbers = random.Random(seed)
    asks = []
    for n in range(count):
        length = round(prompt_tokens * numbers.uniform(0.8, 1.2))
        prompt = random_prompt(numbers, length)
        asks.append(Ask(prompt, max_tokens, seed=n if n % 2 else None, named_tokens=named_tokens))
    return asks


class Reference(Protocol):
    """What requests get when nothing is broken."""

    def learn(self, asks: Sequence[Ask]) -> None: ...

    def answer(self, ask: Ask) -> list[str] | None:
        """The tokens that an ask which was learnt is shown; None where only their number is known."""


def varied(asks: Sequence[Ask], reference: Reference) -> list[Ask]:
    """Some with a stop string out of their own answer, which `reference` has learnt, some with logprobs.

    Of a model whose tokens are words; those of others, named already, stay as they are.
    """
    found = list(asks)
    for n, ask in enumerate(asks):
        answer = None if ask.named_tokens else reference.answer(ask)
        if answer is not None and n % 8 in STOPPED:
            found[n] = stopping(ask, answer)
        elif answer is not None and n % 8 in NAMED:
            found[n] = replace(ask, named_tokens=True)
    return found


def stopping(ask: Ask, answer: Sequence[str]) -> Ask:
    """It ends at the first word past STOPS_FROM with which no earlier one begins, if there is one."""
    for n in range(round(ask.max_tokens * STOPS_FROM), len(answer)):
        if not any(word.startswith(answer[n]) for word in answer[:n]):
            return replace(ask, stop=f" {answer[n]}", stops_after=n + 1)
    return ask


@dataclass(slots=True)
class Heard:
    """All that was asked and came of it."""

    streams: list[Exchange] = field(default_factory=list)  # of the slots
    late: list[Exchange] = field(default_factory=list)  # started by the fault
    probes: list[Exchange] = field(default_factory=list)
    reconnects: int = 0
    client_late_ms: float = 0.0  # of the gaps, so much may be this process's own


class Load:
    """`start`, let things happen, `ease`, then `finish`. Salts are unique per `name`."""

    def __init__(self, app: App, name: str, asks: Sequence[Ask], *, reconnect: bool = False) -> None:
        self.heard = Heard()
        self.name = name
        self._app = app
        self.asks = asks
        self._reconnect = reconnect
        self._slots: list[Exchange | None] = [None] * len(asks)
        self._easing = asyncio.Event()
        self._done = asyncio.Event()
        self._keeping: list[asyncio.Task[None]] = []
        self._probing: list[asyncio.Task[None]] = []
        self._numbers = random.Random(name)
        self._lateness = Lateness()

    async def start(self, *, tokens: int) -> None:
        """Returns once every slot's stream has brought about `tokens` tokens."""
        spawn = asyncio.get_running_loop().create_task
        self._lateness.start()
        self._keeping = [spawn(self._keep(index)) for index in range(len(self.asks))]
        self._probing.append(spawn(self._probe()))
        async with asyncio.timeout(STREAM_S):
            while not all(live is not None and live.n_events >= tokens for live in self._slots):
                if any(
                    live is not None and live.ended.is_set() and live.n_events < tokens
                    for live in self._slots
                ):
                    return  # it failed: the verdict will say so
                await asyncio.sleep(0.01)

    async def late(self, asks: Sequence[Ask]) -> list[Exchange]:
        """Send these too, now."""
        sent = [await self._send(ask, f"late-{n}") for n, ask in enumerate(asks)]
        self.heard.late += sent
        return sent

    async def extra(self, asks: Sequence[Ask]) -> list[Exchange]:
        """Send these too, now; nobody judges what comes of them."""
        return [await self._send(ask, f"extra-{n}") for n, ask in enumerate(asks)]

    @property
    def live(self) -> list[Exchange]:
        return [e for e in self._slots if e is not None and not e.ended.is_set()]

    def busiest(self) -> str:
        """The decode worker that most live streams were placed on."""
        counts = Counter(worker for exchange in self.live if (worker := exchange.decode_worker))
        return counts.most_common(1)[0][0]

    def ease(self) -> None:
        """Start no further stream."""
        self._easing.set()

    async def finish(self) -> Heard:
        """Wait for the last stream; then the probes stop."""
        self.ease()
        heard = self.heard
        await asyncio.gather(*self._keeping)
        await asyncio.gather(*(ended(exchange) for exchange in heard.late))
        self._done.set()
        await self._probing[0]
        await asyncio.gather(*self._probing)
        await asyncio.gather(*(ended(probe) for probe in heard.probes))
        heard.client_late_ms = self._lateness.stop()
        return heard

    async def _keep(self, index: int) -> None:
        await asyncio.sleep(RAMP_S * index / len(self.asks))
        for turn in range(1_000_000):
            self._slots[index] = live = await self._send(self.asks[index], f"{index}-{turn}")
            await ended(live)
            if self._reconnect and not live.answer().whole:
                self.heard.reconnects += 1
                live = await self._send(self.asks[index], f"{index}-{turn}-again")
                await ended(live)
            self.heard.streams.append(live)
            if self._easing.is_set():
                return

    async def _probe(self) -> None:
        loop, every_s = asyncio.get_running_loop(), self._app.setup.probe_every_s
        named = self._app.setup.engine is not None
        due_s = loop.time()
        while not self._done.is_set():
            ask = Ask(random_prompt(self._numbers, 24), PROBE_TOKENS, named_tokens=named)
            probe = await self._send(ask, "")
            if self._reconnect:
                self._probing.append(loop.create_task(self._probe_again(probe)))
            else:
                self.heard.probes.append(probe)
            due_s = max(due_s + every_s, loop.time() - every_s)
            await asyncio.sleep(due_s - loop.time())

    async def _probe_again(self, probe: Exchange) -> None:
        await ended(probe)
        if not probe.answer().whole:
            self.heard.reconnects += 1
            probe = await self._send(probe.ask, "")
            await ended(probe)
        self.heard.probes.append(probe)

    async def _send(self, ask: Ask, salt: str) -> Exchange:
        if salt:
            ask = replace(ask, salt=f"{self.name}-{salt}")
        return await send(self._app.host, self._app.port, ask, self._app.model)


async def ended(exchange: Exchange) -> None:
    """Wait for its end, or end it."""
    try:
        async with asyncio.timeout(STREAM_S):
            await exchange.ended.wait()
    except TimeoutError:
        exchange.error = f"hung: no end within {STREAM_S:.0f} s"
        exchange.hang_up()
        await exchange.ended.wait()


def failed(probe: Answer) -> bool:
    """A short request that did not get all of its tokens."""
    return not probe.whole or probe.error is not None or len(probe.tokens) != probe.ask.max_tokens
