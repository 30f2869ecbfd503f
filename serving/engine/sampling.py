"""The random numbers of sampling: one uniform per (seed, position), from a counter and not from a state.

Position is the token's index in prompt + generated tokens. A stream that is resumed elsewhere, or
replayed, therefore draws the same numbers, and a request's draws do not depend on what else is in the
batch. How a number becomes a token is serving.engine.torch.draw; nothing here needs torch.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio, odd: counters spread over all 64 bits


def uniform(seed: int, position: int) -> float:
    """A double in [0, 1), a pure function of both; version-stable (golden vectors in the tests).

    `seed` is taken modulo 2**64, `position` is >= 0. The seed is mixed before the counter is added, so
    neighbouring seeds do not yield shifted copies of one stream.
    """
    key = _mixed((seed + _STEP) & _MASK)
    bits = _mixed((key + (position + 1) * _STEP) & _MASK)
    return (bits >> 11) * 2.0**-53


def _mixed(value: int) -> int:
    """A bijection of 64 bits in which every input bit changes half of the output bits."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
