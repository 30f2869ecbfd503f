"""Draws by (seed, position), against golden vectors and a slow, obvious reference in numpy."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from serving.engine.base import AttemptId, Mode, SamplingParams, Work
from serving.engine.sampling import uniform
from serving.engine.sequence import Sequence
from serving.engine.torch.draw import draw, filtered

VOCAB = 300
EOS = frozenset({2, 7})

# (seed, position, number): these never change, or resumed streams would.
GOLDEN = [
    (0, 0, 0.6524484863740322),
    (0, 1, 0.7012121095215252),
    (1, 0, 0.36818951565166946),
    (42, 7, 0.7347204584623639),
    (18446744073709551615, 0, 0.3662420901697574),
    (9223372036854775808, 8191, 0.5108594756967109),
    (123456789, 100000, 0.30854708365331107),
]


@pytest.mark.parametrize(("seed", "position", "number"), GOLDEN)
def test_golden_vectors(seed: int, position: int, number: float) -> None:
    assert uniform(seed, position) == number


@given(st.integers(0, (1 << 64) - 1), st.integers(0, 1 << 20))
def test_uniform_is_in_range_and_pure(seed: int, position: int) -> None:
    number = uniform(seed, position)
    assert 0.0 <= number < 1.0
    assert number == uniform(seed, position)


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_uniform_looks_uniform(vary: str) -> None:
    """Along either argument: flat over 20 bins (chi-squared, 19 degrees), neighbours uncorrelated."""
    numbers = np.array([uniform(i, 17) if vary == "seed" else uniform(17, i) for i in range(20_000)])
    counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # p = 0.001
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


def test_neighbouring_seeds_are_not_shifted_copies() -> None:
    streams = [[uniform(seed, position) for position in range(200)] for seed in range(50)]
    flat = [number for stream in streams for number in stream]
    assert len(set(flat)) == len(flat)


# ---------------------------------------------------------------- the reference


def reference_adjusted(logits: NDArray[np.float32], sequence: Sequence) -> NDArray[np.float64]:
    params, out = sequence.params, logits.astype(np.float64)
    for token in set(sequence.tokens):
        out[token] = (
            out[token] / params.repetition_penalty
            if out[token] > 0
            else (out[token] * params.repetition_penalty)
        )
    generated = list(sequence.tokens[sequence.work.n_prompt :])
    for token in set(generated):
        out[token] -= params.presence_penalty + params.frequency_penalty * generated.count(token)
    for token, bias in (params.logit_bias or {}).items():
        if token < VOCAB:
            out[token] += bias
    if len(generated) < params.min_tokens:
        for token in [*params.stop_token_ids, *([] if params.ignore_eos else EOS)]:
            if token < VOCAB:
                out[token] = -np.inf
    return out


def reference_filtered(adjusted: NDArray[np.float64], params: SamplingParams) -> NDArray[np.float64]:
    scaled = adjusted / params.temperature
    if params.top_k is not None and params.top_k < VOCAB:
        scaled[scaled < np.sort(scaled)[-params.top_k]] = -np.inf
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    floor = params.min_p * probabilities.max()
    if params.top_p < 1.0:
        total = 0.0
        for probability in np.sort(probabilities)[::-1]:
            if total >= params.top_p:
                break
            total += probability
            border = probability
        floor = max(floor, border)
    return np.where(probabilities >= floor, probabilities, 0.0)


def reference_draw(logits: NDArray[np.float32], sequence: Sequence) -> tuple[int, float]:
    """The token, and how far the drawn number is from the nearest border between two tokens."""
    params = sequence.params
    adjusted = reference_adjusted(logits, sequence)
    if params.is_greedy:
        best = np.sort(adjusted)
        return int(adjusted.argmax()), float(best[-1] - best[-2])
    probabilities = reference_filtered(adjusted, params)
    target = uniform(params.seed, len(sequence.tokens)) * probabilities.sum()
    total = 0.0
    for token, probability in enumerate(probabilities):
        if total + probability > target:
            return token, min(target - total, total + probability - target)
        total += probability
    raise AssertionError("the number lies beyond all tokens")


def a_sequence(params: SamplingParams, tokens: list[int], n_prompt: int) -> Sequence:
    work = Work(AttemptId(1), Mode.LOCAL, array("I", tokens), n_prompt, params, 0)
    return Sequence(work=work, tokens=array("I", tokens))


def some_logits(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 3, size=(rows, VOCAB)).astype(np.float32))


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "cold": {"temperature": 0.05},
    "freezing": {"temperature": 1e-30},
    "hot": {"temperature": 2.0},
    "top_k": {"top_k": 5},
    "top_k 1": {"top_k": 1},
    "top_k beyond the vocabulary": {"top_k": 100_000},
    "top_p": {"top_p": 0.8},
    "tiny top_p": {"top_p": 1e-9},
    "flat top_p": {"top_p": 0.97, "temperature": 50.0},
    "min_p": {"min_p": 0.1},
    "min_p 1": {"min_p": 1.0},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "negative penalties": {"presence_penalty": -1.0, "frequency_penalty": -0.5},
    "repetition": {"repetition_penalty": 1.3},
    "repetition below 1": {"repetition_penalty": 0.7},
    "bias": {"logit_bias": {5: 100.0, 11: -100.0}},
    "bias beyond the vocabulary": {"logit_bias": {VOCAB: 5.0, 4: 2.0}},
    "min_tokens": {"min_tokens": 50, "stop_token_ids": (4, 5, VOCAB + 3), "temperature": 0.8},
    "greedy min_tokens": {"min_tokens": 50, "temperature": 0.0, "logit_bias": {2: 100.0}},
    "ignore_eos": {"min_tokens": 50, "ignore_eos": True, "logit_bias": {2: 100.0}},
    "all": {
        "temperature": 0.9,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.02,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "logit_bias": {3: 2.0},
        "min_tokens": 30,
    },
}
TOKENS = [9, 2, 40, 9, 9, 17, 40, 250, 9, 40, 40, 3]
N_PROMPT = 5


@pytest.mark.parametrize("case", CASES)
def test_draw_equals_the_reference(case: str) -> None:
    for seed in range(20):
        logits = some_logits(seed)
        sequence = a_sequence(SamplingParams(max_tokens=99, seed=seed, **CASES[case]), TOKENS, N_PROMPT)
        token, margin = reference_draw(logits[0].numpy(), sequence)
        drawn = draw(logits, [sequence], EOS).tokens
        assert drawn == [token] or margin < 1e-5


def test_rows_of_a_mixed_batch_equal_the_reference() -> None:
    sequences = [
        a_sequence(SamplingParams(max_tokens=99, seed=i, **kw), TOKENS[: 6 + i % 6], N_PROMPT)
        for i, kw in enumerate(CASES.values())
    ]
    logits = some_logits(123, len(sequences))
    expected = [reference_draw(row.numpy(), seq) for row, seq in zip(logits, sequences, strict=True)]
    drawn = draw(logits, sequences, EOS).tokens
    for got, (token, margin) in zip(drawn, expected, strict=True):
        assert got == token or margin < 1e-5


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    temperature=st.floats(0.01, 3.0),
    top_p=st.floats(0.01, 1.0),
    top_k=st.one_of(st.none(), st.integers(1, VOCAB)),
    min_p=st.floats(0.0, 1.0),
)
def test_filters_keep_what_the_reference_keeps(
    seed: int, temperature: float, top_p: float, top_k: int | None, min_p: float
) -> None:
    """Compared by probability: at a border rounding may decide either way for one token."""
    params = SamplingParams(
        max_tokens=1, seed=0, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p
    )
    logits = some_logits(seed)
    ours = filtered(logits.clone(), [params])[0].numpy().astype(np.float64)
    reference = reference_filtered(logits[0].numpy().astype(np.float64), params)
    assert ours.sum() > 0
    reference[reference < 1e-30] = ours[ours < 1e-30] = 0.0  # float32 ends there
    differing = (ours > 0) != (reference > 0)
    assert differing.sum() <= 1
    both = (ours > 0) & (reference > 0)
    assert ours[both] == pytest.approx(reference[both], rel=1e-3, abs=1e-7)


def test_the_nucleus_grows_beyond_its_first_candidates() -> None:
    """A flat distribution over a large vocabulary needs more than the first 256 candidates."""
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 0.01, size=(2, 20_000)).astype(np.float32))
    params = [SamplingParams(max_tokens=1, seed=0, top_p=p) for p in (0.5, 0.01)]
    kept = (filtered(logits, params) > 0).sum(-1)
    assert 9_800 < int(kept[0]) < 10_050
    assert 190 < int(kept[1]) < 205


def test_tokens_that_tie_with_the_last_kept_stay() -> None:
    logits = torch.zeros(1, 8)
    logits[0, 3] = 1.0
    kept = filtered(logits.clone(), [SamplingParams(max_tokens=1, seed=0, top_k=2)])
    assert int((kept > 0).sum()) == 8
    kept = filtered(logits.clone(), [SamplingParams(max_tokens=1, seed=0, top_k=1)])
    assert kept.nonzero().tolist() == [[0, 3]]


def test_frequencies_follow_the_distribution() -> None:
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    logits = torch.from_numpy(np.log(probabilities).astype(np.float32)).repeat(4000, 1)
    sequences = [a_sequence(SamplingParams(max_tokens=1, seed=i), [0], 1) for i in range(4000)]
    counts = np.bincount(draw(logits, sequences, frozenset()).tokens, minlength=4)
    assert ((counts - 4000 * probabilities) ** 2 / (4000 * probabilities)).sum() < 16.3  # p = 0.001


def test_a_draw_does_not_depend_on_its_neighbours() -> None:
    logits = some_logits(5, 9)
    params = SamplingParams(max_tokens=99, seed=42, temperature=1.1, top_p=0.9)
    subject = a_sequence(params, TOKENS, N_PROMPT)
    alone = draw(logits[4:5].clone(), [subject], EOS).tokens[0]
    others = [a_sequence(SamplingParams(max_tokens=9, seed=i, top_k=3), [1, 2], 1) for i in range(8)]
    assert draw(logits.clone(), [*others[:4], subject, *others[4:]], EOS).tokens[4] == alone


def test_bfloat16_logits_are_drawn_in_float32() -> None:
    logits = some_logits(6, 3).to(torch.bfloat16)
    sequences = [a_sequence(SamplingParams(max_tokens=9, seed=i, logprobs=2), [1], 1) for i in range(3)]
    assert draw(logits.float(), sequences, EOS) == draw(logits, sequences, EOS)


def test_logprobs_come_from_the_unmodified_logits() -> None:
    logits = some_logits(8, 2)
    reference = torch.log_softmax(logits.double(), -1)
    params = SamplingParams(max_tokens=9, seed=3, temperature=0.0, logit_bias={50: 100.0}, logprobs=3)
    sequences = [a_sequence(SamplingParams(max_tokens=9, seed=1), [1], 1), a_sequence(params, [1], 1)]
    drawn = draw(logits, sequences, EOS)
    assert set(drawn.logprobs) == {1}
    entry = drawn.logprobs[1]
    assert entry.token == 50
    assert entry.logprob == pytest.approx(float(reference[1, 50]), abs=1e-5)
    best = reference[1].topk(3)
    assert [token for token, _ in entry.top] == best.indices.tolist()
    assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)
