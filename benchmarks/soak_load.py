"""Mixed load for long: streams and whole answers of many lengths, repeated prompts, clients that leave."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.fault_app import App
from benchmarks.fault_client import Ask, Exchange, send
from benchmarks.fault_load import Reference, ended, random_prompt
from benchmarks.fault_verdict import judge

CLIENTS = 12
ASKS = 40
LONGEST_PROMPT, LONGEST_ANSWER = 1500, 300
HANG_UPS = 0.08  # of the streams
WHOLE = 0.15  # of the requests, not streamed
REPEATED = 0.4  # of the prompts may be found in a cache
PAUSE_S = 0.3
CUT_S = 5.0  # a stream may be cut so long after a frontend was killed: until then its client's news travels
SHOWN_ERRORS = 5


def soak_asks(seed: int) -> list[Ask]:
    """Short ones mostly; greedy and seeded."""
    numbers = random.Random(seed)
    asks = []
    for n in range(ASKS):
        prompt = random_prompt(numbers, round(16 * (LONGEST_PROMPT / 16) ** numbers.random()))
        tokens = round(8 * (LONGEST_ANSWER / 8) ** numbers.random())
        asks.append(Ask(prompt, tokens, seed=n if n % 2 else None, stream=numbers.random() > WHOLE))
    return asks


class SoakLoad:
    """`start` and `finish` are a pair. Counts every request by what came of it."""

    def __init__(self, app: App, asks: Sequence[Ask], reference: Reference, seed: int) -> None:
        self.answered = 0
        self.failed = 0
        self.hang_ups = 0
        self.reconnects = 0
        self.errors: list[str] = []
        self.frontend_killed_s: float | None = None
        self._app = app
        self._asks = asks
        self._reference = reference
        self._numbers = random.Random(seed)
        self._over = asyncio.Event()
        self._clients: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._clients = [asyncio.get_running_loop().create_task(self._client()) for _ in range(CLIENTS)]

    async def finish(self) -> None:
        """Every request that was begun ends."""
        self._over.set()
        await asyncio.gather(*self._clients)

    async def _client(self) -> None:
        numbers = self._numbers
        while not self._over.is_set():
            ask = numbers.choice(self._asks)
            if numbers.random() > REPEATED:
                ask = replace(ask, salt=f"{numbers.getrandbits(64):x}")
            exchange = await send(self._app.host, self._app.port, ask, self._app.model)
            if ask.stream and numbers.random() < HANG_UPS:
                await self._leave(exchange)
            else:
                await ended(exchange)
                if self._was_cut(exchange):
                    self.reconnects += 1
                    exchange = await send(self._app.host, self._app.port, ask, self._app.model)
                    await ended(exchange)
                self._count(exchange)
            await asyncio.sleep(numbers.random() * PAUSE_S)

    async def _leave(self, exchange: Exchange) -> None:
        """Somewhere in mid-stream."""
        enough = self._numbers.randrange(1, exchange.ask.max_tokens)
        while exchange.n_events < enough and not exchange.ended.is_set():
            await asyncio.sleep(0.02)
        exchange.hang_up()
        await exchange.ended.wait()
        self.hang_ups += 1

    def _was_cut(self, exchange: Exchange) -> bool:
        """Its frontend was killed: nobody but the client can go on."""
        killed_s = self.frontend_killed_s
        if killed_s is None or time.monotonic() - killed_s > CUT_S:
            return False
        return not exchange.answer().whole

    def _count(self, exchange: Exchange) -> None:
        answer = exchange.answer()
        verdict = judge(answer, self._reference.answer(answer.ask))
        self.answered += 1
        if not verdict.completed or verdict.lost or verdict.repeated or verdict.wrong_usage:
            self.failed += 1
            if len(self.errors) < SHOWN_ERRORS:
                self.errors.append(answer.error or str(verdict))
