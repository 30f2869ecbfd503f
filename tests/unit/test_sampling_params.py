"""What a body says of sampling and length, and what model and engine do not allow."""

from __future__ import annotations

from typing import Any

import pytest

from serving.engine.base import Capabilities
from serving.errors import ContextLengthExceeded, InvalidRequest, UnsupportedFeature
from serving.openai import sampling_params
from tests.tiny_tokenizer import tiny_model
from tests.unit.openai_bodies import chat, completion


def test_sampling_params_take_every_field() -> None:
    body = chat(
        max_tokens=7,
        seed=-1,
        temperature=0,
        top_p=0.5,
        top_k=40,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        logit_bias={"5": -100},
        stop_token_ids=[3, 4],
        ignore_eos=True,
        min_tokens=2,
        logprobs=True,
        top_logprobs=4,
    )
    params = sampling_params(body, tiny_model(), 10)
    assert params.max_tokens == 7
    assert params.seed == (1 << 64) - 1
    assert params.is_greedy
    assert (params.top_p, params.top_k, params.min_p) == (0.5, 40, 0.1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1, -1, 1.5)
    assert params.logit_bias == {5: -100.0}
    assert (params.stop_token_ids, params.ignore_eos, params.min_tokens) == ((3, 4), True, 2)
    assert params.logprobs == 4


@pytest.mark.parametrize("off", [-1, 0, None])
def test_top_k_off(off: int | None) -> None:
    assert sampling_params(chat(top_k=off), tiny_model(), 10).top_k is None


def test_no_seed_varies() -> None:
    seeds = {sampling_params(chat(), tiny_model(), 10).seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 1 << 64 for seed in seeds)


def test_seed_repeats() -> None:
    assert {sampling_params(chat(seed=7), tiny_model(), 10).seed for _ in range(5)} == {7}


def test_max_completion_tokens() -> None:
    assert sampling_params(chat(max_completion_tokens=3), tiny_model(), 10).max_tokens == 3
    assert sampling_params(chat(max_completion_tokens=3, max_tokens=9), tiny_model(), 10).max_tokens == 3


def test_default_max_tokens() -> None:
    model = tiny_model(context_tokens=100)
    assert sampling_params(chat(), model, 30).max_tokens == 70
    assert sampling_params(completion(), model, 30).max_tokens == 16
    assert sampling_params(completion(), model, 95).max_tokens == 5


def test_context_overflow_says_numbers() -> None:
    model = tiny_model(context_tokens=100)
    with pytest.raises(ContextLengthExceeded) as caught:
        sampling_params(chat(), model, 150)
    assert "150" in caught.value.message
    assert "100" in caught.value.message
    with pytest.raises(ContextLengthExceeded) as caught:
        sampling_params(chat(max_tokens=31), model, 70)
    assert all(number in caught.value.message for number in ("70", "31", "100"))
    assert sampling_params(chat(max_tokens=30), model, 70).max_tokens == 30


@pytest.mark.parametrize("n", [10**9, 10**18, 10**30, 10**300])
def test_huge_max_tokens(n: int) -> None:
    with pytest.raises(ContextLengthExceeded) as caught:
        sampling_params(chat(max_tokens=n), tiny_model(), 10)
    assert caught.value.param == "max_tokens"
    assert len(caught.value.message) < 300


def test_logit_bias_out_of_vocab() -> None:
    for fields in ({"logit_bias": {"99999999": 1}}, {"stop_token_ids": [99999999]}):
        with pytest.raises(InvalidRequest) as caught:
            sampling_params(chat(**fields), tiny_model(), 10)
        assert caught.value.param in fields


def test_min_tokens() -> None:
    assert sampling_params(chat(min_tokens=40), tiny_model(), 10).min_tokens == 40
    with pytest.raises(InvalidRequest) as caught:
        sampling_params(chat(min_tokens=40, max_tokens=39), tiny_model(), 10)
    assert caught.value.param == "min_tokens"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": True}, "logprobs"),
        ({"logit_bias": {"1": 1}}, "logit_bias"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ],
)
def test_what_the_engine_lacks_is_refused(fields: dict[str, Any], param: str) -> None:
    model = tiny_model(capabilities=Capabilities(logprobs=False, logit_bias=False, penalties=False))
    with pytest.raises(UnsupportedFeature) as caught:
        sampling_params(chat(**fields), model, 10)
    assert caught.value.param == param
    neutral = chat(
        presence_penalty=0, frequency_penalty=0.0, repetition_penalty=1, logprobs=False, logit_bias={}
    )
    sampling_params(neutral, model, 10)
