"""Through HTTP, fp32, greedy: disaggregated, aggregated and `transformers` generate, token for token."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from serving.detokenize import Vocabulary
from serving.engine.base import TokenLogprobs
from serving.local_cluster import LocalCluster
from serving.manifest import resolve_weights
from serving.tokenizer import Tokenizer
from tests.serve.client import Client
from tests.serve.metrics import Scrape
from tests.serve.models.conftest import AGGREGATED, REAL
from tests.unit.tiny_models import SHAPES

NEW_TOKENS = 32
CONCURRENCY = 16
BLOCK_TOKENS = 32
TIE = 1e-4  # a first divergence counts as one only above this gap between the two best logits


def prompts(vocab: range, longest: int, seed: int, n_prompts: int = 24) -> list[list[int]]:
    """Of 1 to `longest` tokens; two of three begin with one of three shared heads."""
    rng = random.Random(seed)
    heads = [[rng.choice(vocab) for _ in range(longest)] for _ in range(3)]
    result = []
    for n in range(n_prompts):
        length = max(1, round(longest * (n / (n_prompts - 1)) ** 2))
        shared = rng.randrange(length) if n % 3 else 0
        own = [rng.choice(vocab) for _ in range(length - shared)]
        result.append(heads[n % 3][:shared] + own)
    assert (len(result[0]), len(result[-1])) == (1, longest)
    rng.shuffle(result)
    return result


def answers(client: Client, model: str, asked: list[list[int]]) -> list[dict[str, Any]]:
    def ask(prompt: list[int]) -> dict[str, Any]:
        return client.complete(
            model, prompt, max_tokens=NEW_TOKENS, temperature=0, logprobs=1, ignore_eos=True
        )

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        return list(pool.map(ask, asked))


def tokens_of(answer: dict[str, Any]) -> list[str]:
    assert answer["usage"]["completion_tokens"] == NEW_TOKENS
    tokens: list[str] = answer["choices"][0]["logprobs"]["tokens"]
    return tokens


@torch.inference_mode()
def reference(directory: Path, asked: list[list[int]]) -> Iterator[tuple[list[int], list[float]]]:
    """`generate`'s tokens for each prompt, and at each position the gap between its two best logits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    try:
        for prompt in asked:
            out = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                min_new_tokens=NEW_TOKENS,
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
            best = torch.stack([logits[0].topk(2).values for logits in out.logits])
            yield out.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist()
    finally:
        torch.set_num_threads(threads)


def check_equal(
    directory: Path, asked: list[list[int]], split: list[dict[str, Any]], whole: list[dict[str, Any]]
) -> None:
    vocabulary = Vocabulary(Tokenizer.from_file(directory / "tokenizer.json"))
    ties = []
    for n, (ids, gaps) in enumerate(reference(directory, asked)):
        drawn = vocabulary.entries([TokenLogprobs(token, 0.0, []) for token in ids])
        expected = [entry.chosen.text for entry in drawn]
        for name, answer in (("disaggregated", split[n]), ("aggregated", whole[n])):
            got = tokens_of(answer)
            if got == expected:
                continue
            first = next(i for i in range(NEW_TOKENS) if got[i] != expected[i])
            ties.append(f"{name}, prompt of {len(asked[n])}: token {first}, gap {gaps[first]:.2g}")
            assert gaps[first] < TIE, ties[-1]
    if ties:
        print("first divergences at near-ties:", *ties, sep="\n  ")


def check_handed_over(scrape: Scrape, model: str, asked: list[list[int]], before: dict[str, float]) -> None:
    """Decode computed no prompt token, and moved what it did not hold: bytes equal blocks."""
    blocks = scrape.total("kvrelay_handoff_blocks_total", model=model) - before["blocks"]
    moved = scrape.total("kvrelay_handoff_bytes_total", model=model) - before["bytes"]
    computed = scrape.total("kvrelay_prompt_tokens_computed_total", model=model, pool="decode")
    needed = sum(-(-len(prompt) // BLOCK_TOKENS) for prompt in asked)
    assert computed == 0
    assert 0 < blocks <= needed
    assert moved / blocks == before["block_bytes"]


def handoff_totals(scrape: Scrape, model: str, block_bytes: int) -> dict[str, float]:
    return {
        "blocks": scrape.total("kvrelay_handoff_blocks_total", model=model),
        "bytes": scrape.total("kvrelay_handoff_bytes_total", model=model),
        "block_bytes": block_bytes,
    }


@pytest.mark.timeout(900)
def test_real_model(cluster: LocalCluster, client: Client, scrape: Scrape) -> None:
    """decode_does_not_prefill, cold_equals_warm, shared_prefix_no_bleed on the real thing."""
    directory = resolve_weights(REAL)
    asked = prompts(range(1000, 40_000), longest=1500, seed=1, n_prompts=12)
    before = handoff_totals(scrape, REAL, BLOCK_TOKENS * 30 * 2 * 3 * 64 * 4)
    split = answers(client, REAL, asked)
    check_handed_over(scrape, REAL, asked, before)
    whole = answers(client, REAL + AGGREGATED, asked)
    check_equal(directory, asked, split, whole)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape(
    cluster: LocalCluster, client: Client, scrape: Scrape, tiny_directories: dict[str, Path], shape: str
) -> None:
    directory = tiny_directories[shape]
    heads, dim = (2, 16) if shape == "qwen3" else (2, 8)
    before = handoff_totals(scrape, shape, BLOCK_TOKENS * 2 * 2 * heads * dim * 4)
    asked = prompts(range(10, 300), longest=1500, seed=2)
    split = answers(client, shape, asked)
    check_handed_over(scrape, shape, asked, before)
    whole = answers(client, shape + AGGREGATED, asked)
    check_equal(directory, asked, split, whole)
