"""Faults with a real model: what it answers undisturbed, and how long a lost prompt takes anew."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.fault_app import App, Setup
from benchmarks.fault_client import Ask, Exchange, send
from benchmarks.fault_load import ended, random_prompt
from serving.manifest import resolve_weights
from serving.tokenizer import Tokenizer

MODEL = "smollm2"
WEIGHTS = "smollm2-135m"
STREAM_TOKENS = 120
ROUNDS = 3
WHO = ("farmer", "sailor", "teacher", "painter", "doctor", "gardener")
# None: greedy. With these no draw falls so near a border between two tokens that rounding decides: 1e-4 of
# all probability at the least, and who else is in the batch moves borders by some 1e-6. Over the whole
# vocabulary one draw in 25 would be nearer than 2e-5: tokens of the tail are that small.
SEEDS = (None, 1, None, 2, None, 12)
TOP_P = 0.9
# Of these greedy ones: what a resumed answer has drawn before must count on. The best token stays ahead of
# the next by 0.018 in logarithm at the least, where rounding moves some 1e-5.
PENALISED = (0, 4)
PRESENCE_PENALTY, FREQUENCY_PENALTY = 0.4, 0.2
STORY = (
    "Once upon a time there was a {who} who lived in a small house by the sea. Every morning the {who} "
    "went out to see what the night had left on the beach, and every evening there was a story to tell. "
)
REPEATS = 4  # about 190 tokens
GPU_SHARE = 0.05  # of each worker: a rollout runs all of them twice


def real_setup(dtype: str, device: str = "cpu") -> Setup:
    """SmolLM2 in the torch engine, one thread a worker; all workers share one GPU."""
    engine = {
        "kind": "torch",
        "dtype": dtype,
        "block_tokens": 32,
        "kv_bytes": 512 << 20,
        "chunk_tokens": 256,
        "max_batch": 64,
        "threads": 1,
        "device": device,
    }
    return Setup(
        model=MODEL,
        engine=engine,
        gpus=0.0 if device == "cpu" else GPU_SHARE,
        begun_tokens=20,
        long_prompt_tokens=800,
        probe_every_s=2.0,
        frontends=2,
    )


def real_asks() -> list[Ask]:
    """Greedy and seeded in turn, some with penalties. Plain English: after random tokens the model is so
    undecided that the last bits of a sum, which depend on who else is in the batch, decide."""
    tokenizer = Tokenizer.from_file(resolve_weights(WEIGHTS) / "tokenizer.json")
    asks = []
    for n, who in enumerate(WHO):
        text = STORY.format(who=who) * REPEATS + f"The story of the {who}:"
        prompt = tuple(tokenizer.encode(text, add_special_tokens=True))
        ask = Ask(prompt, STREAM_TOKENS, seed=SEEDS[n], top_p=TOP_P, named_tokens=True)
        if n in PENALISED:
            ask = replace(ask, presence_penalty=PRESENCE_PENALTY, frequency_penalty=FREQUENCY_PENALTY)
        asks.append(ask)
    return asks


class UndisturbedAnswers:
    """The same application's answers while nothing happens; `exact` False: only their length is known."""

    def __init__(self, app: App, *, exact: bool) -> None:
        self._app = app
        self._exact = exact
        self._known: dict[Ask, list[str]] = {}  # by what decides the tokens

    def learn(self, asks: Sequence[Ask]) -> None:
        asks = [ask for ask in asks if self._exact and unsalted(ask) not in self._known]
        if not asks:
            return
        # The caller's own event loop runs: this one is another thread's.
        thread = threading.Thread(target=lambda: asyncio.run(self._ask(asks)))
        thread.start()
        thread.join()

    def answer(self, ask: Ask) -> list[str] | None:
        return self._known[unsalted(ask)] if self._exact else None

    async def _ask(self, asks: Sequence[Ask]) -> None:
        for exchange in await answered(self._app, [replace(ask, salt="undisturbed") for ask in asks]):
            answer = exchange.answer()
            if not answer.whole:
                raise RuntimeError(f"an undisturbed stream failed: {answer.error}")
            self._known[unsalted(answer.ask)] = answer.tokens


def unsalted(ask: Ask) -> Ask:
    return replace(ask, salt="")


async def answered(app: App, asks: Sequence[Ask]) -> list[Exchange]:
    """All at once, and wait for the last."""
    exchanges = [await send(app.host, app.port, ask, app.model) for ask in asks]
    await asyncio.gather(*(ended(exchange) for exchange in exchanges))
    return exchanges


async def reprefill_ms(app: App, asks: Sequence[Ask], lost: int, length: int | None = None) -> float:
    """How long to compute anew what `lost` streams had when a fault struck, and to hand it over; or `lost`
    prompts of that `length`.

    Measured with nothing broken: the other streams run, then as many prompts of that length come at once.
    The longest wait for a second token (the first one does not need the KV), in the median round.
    """
    numbers = random.Random(11)
    waits = []
    for turn in range(ROUNDS):
        others = [
            await send(app.host, app.port, replace(ask, salt=f"beside-{turn}"), app.model)
            for ask in asks[lost:]
        ]
        while not all(exchange.n_events >= app.setup.begun_tokens for exchange in others):
            await asyncio.sleep(0.01)
        n_tokens = length or len(asks[0].prompt) + app.setup.begun_tokens
        lost_asks = [Ask(random_prompt(numbers, n_tokens), 2, named_tokens=True) for _ in range(lost)]
        fresh = await answered(app, lost_asks)
        answers = [exchange.answer() for exchange in fresh]
        waits.append(max(answer.times_s[-1] - answer.sent_s for answer in answers) * 1e3)
        for exchange in others:
            exchange.hang_up()
    return round(sorted(waits)[ROUNDS // 2], 1)
