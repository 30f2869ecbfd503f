"""From logits to tokens, for all rows of a step at once.

A row is first adjusted (repetition penalty, presence and frequency penalty, logit bias, bans), then a
greedy row takes the largest logit. Other rows are filtered in the order temperature, top_k, top_p,
min_p, and drawn by the inverse of the cumulative distribution **in token order**: no sort, and float
noise moves a border by that noise instead of swapping neighbours of nearly equal probability. Tokens
that tie with the last one kept by top_k or top_p stay.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import torch
from torch import Tensor

from serving.engine.base import SamplingParams, TokenLogprobs
from serving.engine.sampling import uniform
from serving.engine.sequence import Drawn, Sequence
from serving.engine.stopping import banned_token_ids

_NUCLEUS_START = 256  # candidates looked at first for top_p; grows until they hold enough probability
_NUCLEUS_GROWTH = 8


def draw(logits: Tensor, sequences: Rows[Sequence], eos_token_ids: frozenset[int]) -> Drawn:
    """One token per row of `logits` (rows, vocab) for `sequences`; changes `logits` in place.

    The token of a sequence gets position `len(sequence.tokens)`.
    """
    asked = [row for row, sequence in enumerate(sequences) if sequence.params.logprobs is not None]
    unmodified = torch.log_softmax(logits[asked].float(), -1) if asked else None  # (asked, vocab)
    logits = logits.float()
    for row, sequence in enumerate(sequences):
        _adjust(logits[row], sequence, eos_token_ids)
    random = [row for row, sequence in enumerate(sequences) if not sequence.params.is_greedy]
    if not random:
        tokens: list[int] = logits.argmax(-1).tolist()
    elif len(random) == len(sequences):
        tokens = _sampled(logits, sequences).tolist()
    else:
        chosen = logits.argmax(-1)
        chosen[random] = _sampled(logits[random], [sequences[row] for row in random])
        tokens = chosen.tolist()
    drawn = Drawn(tokens)
    if unmodified is not None:
        _add_logprobs(drawn, unmodified, asked, sequences)
    return drawn


def _adjust(logits: Tensor, sequence: Sequence, eos_token_ids: frozenset[int]) -> None:
    """Apply what `sequence` asked for to its row of logits (vocab,), in place.

    Repetition counts prompt and generated tokens; presence and frequency generated ones only. Bias comes
    after the penalties and the ban last, so neither can be outweighed.
    """
    params = sequence.params
    device = logits.device
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(np.array(sequence.tokens, dtype=np.int64))).to(device)
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if (params.presence_penalty or params.frequency_penalty) and sequence.n_generated:
        generated = np.array(sequence.tokens[sequence.work.n_prompt :], dtype=np.int64)
        found, counts = np.unique(generated, return_counts=True)
        off = params.presence_penalty + params.frequency_penalty * counts
        logits[torch.from_numpy(found).to(device)] -= torch.from_numpy(off.astype(np.float32)).to(device)
    vocab = logits.shape[0]  # ids beyond it can never be drawn, so bias and bans of them mean nothing
    bias = {token: value for token, value in (params.logit_bias or {}).items() if token < vocab}
    if bias:
        values = torch.tensor(list(bias.values()), dtype=logits.dtype)
        logits[torch.tensor(list(bias), device=device)] += values.to(device)
    banned = [t for t in banned_token_ids(params, eos_token_ids, sequence.n_generated) if t < vocab]
    if banned:
        logits[torch.tensor(banned, device=device)] = -torch.inf


def _sampled(logits: Tensor, sequences: Rows[Sequence]) -> Tensor:
    """Tokens (rows,) drawn from the filtered distributions of `logits` (rows, vocab)."""
    device = logits.device
    params = [sequence.params for sequence in sequences]
    probabilities = filtered(logits, params)  # (rows, vocab)
    numbers = [uniform(sequence.params.seed, len(sequence.tokens)) for sequence in sequences]
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:].contiguous()
    target = torch.tensor(numbers, dtype=total.dtype).to(device)[:, None] * total
    token = torch.searchsorted(cumulative, target, right=True)  # first one whose sum exceeds the target
    last = torch.searchsorted(cumulative, total)  # the last with any probability: rounding may pass it
    return torch.minimum(token, last)[:, 0]


def filtered(logits: Tensor, params: Rows[SamplingParams]) -> Tensor:
    """Probabilities (rows, vocab), not renormalised, zero where temperature, top_k, top_p or min_p cut."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32).to(logits.device)[:, None]

    highest = logits.max(-1, keepdim=True).values
    scaled = (logits - highest) / column([p.temperature for p in params])  # shifted: no overflow when cold
    with_k = [row for row, p in enumerate(params) if p.top_k is not None and p.top_k < logits.shape[1]]
    if with_k:
        ks = [params[row].top_k or 1 for row in with_k]
        best = scaled[with_k].topk(max(ks)).values  # (with_k, largest k)
        border = best[torch.arange(len(ks)), torch.tensor(ks) - 1][:, None]
        scaled[with_k] = scaled[with_k].masked_fill(scaled[with_k] < border, -torch.inf)
    probabilities = torch.softmax(scaled, -1)
    floor = column([p.min_p for p in params]) * probabilities.max(-1, keepdim=True).values
    with_p = [row for row, p in enumerate(params) if p.top_p < 1.0]
    if with_p:
        border = _nucleus_border(probabilities[with_p], column([params[row].top_p for row in with_p]))
        floor[with_p] = torch.maximum(floor[with_p], border)
    return probabilities.masked_fill_(probabilities < floor, 0.0)


def _nucleus_border(probabilities: Tensor, top_p: Tensor) -> Tensor:
    """The smallest probability (rows, 1) within the fewest best tokens that sum to `top_p` (rows, 1)."""
    vocab = probabilities.shape[1]
    size = min(_NUCLEUS_START, vocab)
    while True:
        best = probabilities.topk(size).values  # (rows, size), descending
        before = best.cumsum(-1) - best  # probability of all better tokens
        if size == vocab or bool(((before + best)[:, -1:] >= top_p).all()):
            count = (before < top_p).sum(-1, keepdim=True)
            return best.gather(1, count - 1)
        size = min(size * _NUCLEUS_GROWTH, vocab)


def _add_logprobs(drawn: Drawn, values: Tensor, rows: list[int], sequences: Rows[Sequence]) -> None:
    """Fill `drawn.logprobs` from `values` (rows, vocab), the log-probabilities before any adjustment."""
    tokens = torch.tensor([drawn.tokens[row] for row in rows], device=values.device)
    chosen: list[float] = values.gather(1, tokens[:, None])[:, 0].tolist()
    wanted = [sequences[row].params.logprobs or 0 for row in rows]
    best = values.topk(min(max(wanted), values.shape[1]))  # (rows, most wanted), best first
    for row, logprob, n, top, ids in zip(
        rows, chosen, wanted, best.values.tolist(), best.indices.tolist(), strict=True
    ):
        pairs = list(zip(ids[:n], top[:n], strict=True))
        drawn.logprobs[row] = TokenLogprobs(token=drawn.tokens[row], logprob=logprob, top=pairs)
