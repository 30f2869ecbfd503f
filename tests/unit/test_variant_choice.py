"""Which variant gets a request: length, availability, weights."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from serving.config import PromptRange, load_config
from serving.engine.base import SamplingParams
from serving.errors import ContextLengthExceeded
from serving.frontend_host import VariantGenerator
from serving.generation import CollectedText, GenerationInfo, GenerationRequest
from serving.variant_choice import Offer, choose_variant


def offer(name: str, low: int = 1, high: int | None = None, able: bool = True) -> Offer:
    return Offer(name, PromptRange(low, high), able)


LONG, SHORT = offer("long", 1001, 8000), offer("short", 1, 1000)
LONG_DOWN, SHORT_DOWN = offer("long", 1001, 8000, able=False), offer("short", 1, 1000, able=False)

CHOICES = {
    "one variant": ([offer("a")], {}, 5, "a"),
    "no rules, no weights: the first": ([offer("a"), offer("b")], {}, 5, "a"),
    "short": ([LONG, SHORT], {}, 1000, "short"),
    "long": ([LONG, SHORT], {}, 1001, "long"),
    "the longest": ([LONG, SHORT], {}, 8000, "long"),
    "short is down: min yields": ([LONG, SHORT_DOWN], {}, 5, "long"),
    "long is down: max does not": ([LONG_DOWN, SHORT], {}, 5000, "long"),
    "all are down: who would answer": ([LONG_DOWN, SHORT_DOWN], {}, 5, "short"),
    "a weight of 0 takes a variant out": ([LONG, SHORT], {"long": 1, "short": 0}, 5, "long"),
    "and not where nothing else fits": ([LONG, SHORT], {"short": 1}, 5000, "long"),
    "weights do not beat length": ([LONG, SHORT], {"long": 99, "short": 1}, 5, "short"),
    "a weighted one that is down": ([offer("a", able=False), offer("b")], {"a": 1}, 5, "b"),
}


@pytest.mark.parametrize(("offers", "weights", "tokens", "expected"), CHOICES.values(), ids=CHOICES)
def test_choice(offers: list[Offer], weights: dict[str, float], tokens: int, expected: str) -> None:
    assert choose_variant(offers, weights, tokens, 0.5) == expected


def test_a_prompt_beyond_all_of_them() -> None:
    with pytest.raises(
        ContextLengthExceeded, match=r"has 8001 tokens; prompts of this model may have 8000"
    ):
        choose_variant([LONG, SHORT], {}, 8001, 0.5)


def test_weights_among_those_that_fit() -> None:
    """A canary within the short lane: a tenth of its traffic, none of the long one's."""
    canary = offer("canary", 1, 1000)
    weights = {"long": 1, "short": 0.9, "canary": 0.1}
    points = [i / 1000 for i in range(1000)]
    short = Counter(choose_variant([LONG, SHORT, canary], weights, 5, point) for point in points)
    long = Counter(choose_variant([LONG, SHORT, canary], weights, 5000, point) for point in points)
    assert long == {"long": 1000}
    assert short["short"] == pytest.approx(900, abs=1)
    assert short["canary"] == pytest.approx(100, abs=1)


# ---------------------------------------------------------------- at the frontend


def generator(able: dict[str, bool]) -> tuple[VariantGenerator, list[tuple[str, int]]]:
    """Two variants by length, as configured, and who was given how many prompt tokens."""
    started: list[tuple[str, int]] = []
    config = load_config(
        {
            "models": [
                {
                    "name": "m",
                    "variants": [
                        {"name": "long", "weights": "w", "prompt_tokens": {"min": 101, "max": 1000}},
                        {"name": "short", "weights": "w", "prompt_tokens": {"max": 100}},
                    ],
                }
            ]
        }
    )

    def links(name: str) -> Any:
        def start(request: GenerationRequest, sink: object) -> Any:
            started.append((name, len(request.prompt)))
            return SimpleNamespace(info=GenerationInfo())

        return SimpleNamespace(can_answer=able[name], coordinator=SimpleNamespace(start=start))

    variants = {("m", name): links(name) for name in able}
    return VariantGenerator(config, variants, seed=1, clock=time.monotonic), started


def ask(generator: VariantGenerator, n_tokens: int) -> None:
    params = SamplingParams(max_tokens=1, seed=1)
    generator.start(GenerationRequest("r", "m", array("I", range(n_tokens)), params), CollectedText())


def test_the_frontend_routes_by_length() -> None:
    door, started = generator({"long": True, "short": True})
    for n_tokens in (1, 100, 101, 1000):
        ask(door, n_tokens)
    assert started == [("short", 1), ("short", 100), ("long", 101), ("long", 1000)]
    with pytest.raises(ContextLengthExceeded):
        ask(door, 1001)


def test_the_frontend_sends_short_prompts_long_when_it_must() -> None:
    door, started = generator({"long": True, "short": False})
    ask(door, 5)
    assert started == [("long", 5)]
