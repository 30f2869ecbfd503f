"""A simulated model under the real scheduler, block pool and hand-off: times from a profile, real bytes.

Tokens are made up but follow from the client's prompt, the seed (when sampling) and the position alone,
so local, disaggregated and resumed runs agree. Each computed token writes 8 bytes that name it into its
place in the pool; `accept` checks them after a hand-off, so lost or mixed-up KV is found.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as Items

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from kvrouter.hashing import token_bytes
from serving.config import EngineConfig, SimProfile
from serving.engine.base import Capabilities, Counters, KVMemory, TokenLogprobs
from serving.engine.core import EngineCore
from serving.engine.sequence import Drawn, PrefillSlice, Sequence, StepPlan
from serving.engine.stopping import banned_token_ids
from serving.errors import ConfigError

CAPABILITIES = Capabilities(penalties=False, logit_bias=False, migrate_kv=True)

_Words = npt.NDArray[np.uint64]
_MASK = (1 << 64) - 1
# Odd 64-bit constants that spread neighbouring inputs over all bits (golden ratio, splitmix64).
_STEP = 0x9E3779B97F4A7C15
_SPREAD = 0xBF58476D1CE4E5B9
_WORD = 8  # bytes written per token
_REMEMBERED = 65_536  # sequences whose stream is kept; more are worked out again


def _kv_words(tokens: npt.NDArray[np.uint32], positions: npt.NDArray[np.int64]) -> _Words:
    """The word of each token; never 0, so memory nobody wrote is told apart."""
    mixed = (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(_STEP)
    mixed ^= (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_SPREAD)
    return mixed | np.uint64(1)


def _mix(base: int, index: int) -> int:
    """31 well-spread bits of (base, index)."""
    x = (base + index * _STEP) & _MASK
    return ((x ^ (x >> 32)) * _SPREAD & _MASK) >> 33


class SimRunner:
    """Runner of a made-up model; draws from `token_ids` without the EOS ids."""

    def __init__(
        self,
        profile: SimProfile,
        *,
        block_tokens: int,
        kv_bytes: int,
        token_ids: Items[int],
        eos_token_ids: Iterable[int],
        model_digest: str,
        counters: Counters,
    ) -> None:
        self.context_tokens: int = profile.context_tokens
        self.eos_token_ids = frozenset(eos_token_ids)
        self.counters = counters
        self._profile = profile
        self._block_tokens = block_tokens
        self._ids = [token for token in token_ids if token not in self.eos_token_ids]
        if not self._ids:
            raise ConfigError("the simulated model has no token to draw: token_ids holds EOS ids only")
        block_bytes = block_tokens * profile.kv_bytes_per_token
        n_blocks = kv_bytes // block_bytes
        if n_blocks < 1:
            raise ConfigError(f"engine.kv_bytes = {kv_bytes}; allowed: one block ({block_bytes}) or more")
        region = np.zeros(n_blocks * block_bytes, dtype=np.uint8)
        self.memory = KVMemory(region.ctypes.data, block_bytes, n_blocks, owner=region)
        self.layout = xxh3_64_hexdigest(
            f"sim1|{model_digest}|{profile.kv_bytes_per_token}|{block_tokens}".encode()
        )
        # (token slots,): the first 8 bytes of each token's range; slot = block * block_tokens + offset
        self._words: _Words = np.ndarray(
            (n_blocks * block_tokens,), np.uint64, region.data, 0, (profile.kv_bytes_per_token,)
        )
        self._streams: dict[int, tuple[int, bool]] = {}  # attempt -> (base, draws with care)

    def run(self, plan: StepPlan) -> Drawn:
        """See Runner; takes as long as the profile says, counted from the call."""
        began_s = time.monotonic()
        if plan.decodes:
            self._write_decodes(plan.decodes)
        for piece in plan.prefills:
            self._write_slice(piece)
        drawn = self._draw(plan.drawing)
        left_s = began_s + self._step_s(plan) - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)
        return drawn

    def accept(self, sequence: Sequence, n_tokens: int) -> str | None:
        """See Runner: compare all blocks of these tokens with what those should have written."""
        size = self._block_tokens
        positions = np.arange(n_tokens)
        wrong = self._words[self._slots(sequence, 0, n_tokens)] != _kv_words(
            np.frombuffer(sequence.tokens[:n_tokens], np.uint32), positions
        )
        bad = np.unique(positions[wrong] // size)
        self.counters.content_checks += -(-n_tokens // size)
        self.counters.content_errors += len(bad)
        if not len(bad):
            return None
        first = int(bad[0])
        return f"{len(bad)} KV blocks hold other bytes, first block {first} (id {sequence.blocks[first]})"

    def _step_s(self, plan: StepPlan) -> float:
        profile = self._profile
        batch = len(plan.decodes) + len(plan.prefills)
        prompt_tokens = sum(piece.count for piece in plan.prefills)
        return 1e-3 * (
            profile.step_ms
            + batch * profile.step_ms_per_sequence
            + prompt_tokens * profile.prefill_ms_per_token
        )

    # ------------------------------------------------------------ content

    def _write_decodes(self, sequences: list[Sequence]) -> None:
        size = self._block_tokens
        positions = [seq.computed for seq in sequences]
        tokens = [seq.tokens[at] for seq, at in zip(sequences, positions, strict=True)]
        slots = [
            seq.blocks[at // size] * size + at % size for seq, at in zip(sequences, positions, strict=True)
        ]
        self._words[slots] = _kv_words(np.array(tokens, np.uint32), np.array(positions, np.int64))

    def _write_slice(self, piece: PrefillSlice) -> None:
        seq, start, end = piece.sequence, piece.start, piece.start + piece.count
        tokens = np.frombuffer(seq.tokens[start:end], np.uint32)
        self._words[self._slots(seq, start, end)] = _kv_words(tokens, np.arange(start, end))

    def _slots(self, seq: Sequence, start: int, end: int) -> npt.NDArray[np.int64]:
        size = self._block_tokens
        first = start // size
        blocks = np.array(seq.blocks[first : -(-end // size)], np.int64)
        positions = np.arange(start, end)
        return blocks[positions // size - first] * size + positions % size

    # ------------------------------------------------------------ tokens

    def _draw(self, sequences: list[Sequence]) -> Drawn:
        ids, streams = self._ids, self._streams
        n_ids = len(ids)
        tokens: list[int] = []
        logprobs: dict[int, TokenLogprobs] = {}
        for seq in sequences:
            stream = streams.get(seq.work.attempt)
            if stream is None:
                stream = self._remember(seq)
            x = (stream[0] + len(seq.tokens) * _STEP) & _MASK  # _mix, inlined: once a token
            token = ids[(((x ^ (x >> 32)) * _SPREAD & _MASK) >> 33) % n_ids]
            if stream[1]:
                token = self._allowed(seq, token)
                if seq.params.logprobs is not None:
                    logprobs[len(tokens)] = self._logprobs(seq, stream[0], token)
            tokens.append(token)
        return Drawn(tokens, logprobs)

    def _remember(self, seq: Sequence) -> tuple[int, bool]:
        """What fixes the stream of `seq`: the client's prompt and, when sampling, the seed."""
        params = seq.params
        prompt = token_bytes(seq.tokens[: seq.work.n_prompt])
        base = xxh3_64_intdigest(prompt, 0 if params.is_greedy else params.seed)
        careful = params.logprobs is not None or (params.min_tokens > 0 and bool(params.stop_token_ids))
        if len(self._streams) >= _REMEMBERED:
            self._streams.clear()
        self._streams[seq.work.attempt] = base, careful
        return base, careful

    def _allowed(self, seq: Sequence, token: int) -> int:
        """`token`, or the next of the list after it that is not banned."""
        banned = banned_token_ids(seq.params, self.eos_token_ids, seq.n_generated)
        if token not in banned:
            return token
        at = self._ids.index(token)
        rest = (t for t in self._ids[at:] + self._ids[:at] if t not in banned)
        return next(rest, token)  # everything is banned: the token stands, it cannot stop anyway

    def _logprobs(self, seq: Sequence, base: int, token: int) -> TokenLogprobs:
        """Made up: the drawn token is the likeliest, the others fall off by one each."""
        index = len(seq.tokens)
        logprob = -0.01 - (_mix(base ^ _SPREAD, index) & 0xFFFF) / 0x10000
        top = [(token, logprob)]
        at = _mix(base ^ _STEP, index)
        while len(top) < min(seq.params.logprobs or 0, len(self._ids)):
            other = self._ids[at % len(self._ids)]
            if all(other != known for known, _ in top):
                top.append((other, logprob - len(top)))
            at += 1
        return TokenLogprobs(token, logprob, top[: seq.params.logprobs])


def build_sim_engine(
    config: EngineConfig,
    profile: SimProfile,
    token_ids: Items[int],
    eos_token_ids: Iterable[int],
    model_digest: str,
) -> EngineCore:
    """An engine that serves the made-up model. `token_ids`: what it may draw, real ids of a tokenizer.

    Raises ConfigError when `config.kv_bytes` holds no block or nothing is left to draw.
    """
    counters = Counters()
    runner = SimRunner(
        profile,
        block_tokens=config.block_tokens,
        kv_bytes=config.kv_bytes,
        token_ids=token_ids,
        eos_token_ids=eos_token_ids,
        model_digest=model_digest,
        counters=counters,
    )
    return EngineCore(
        runner,
        config,
        capabilities=CAPABILITIES,
        counters=counters,
        decode_period_s=profile.decode_ms * 1e-3 or None,
    )
