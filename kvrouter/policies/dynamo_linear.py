"""Dynamo's default: blocks to prefill plus blocks to decode, one for one. The total is in blocks.

    total = max(queued + prompt - cached, 0) / block + decode blocks with this request

Overlap credit and prefill scale are 1, temperature 0: its defaults (selector/default.rs). By default its
index knows what workers' events told, and nothing of prefixes that still compute.
"""

from __future__ import annotations

from typing import ClassVar

from kvrouter.cost import Candidate, Demand, Terms
from kvrouter.policies.policy import Policy

__all__ = ["DynamoLinear"]


class DynamoLinear(Policy):
    name: ClassVar[str] = "dynamo_linear"
    sees_pending: ClassVar[bool] = False

    def score(self, demand: Demand, candidate: Candidate) -> Terms:
        tokens = candidate.queued_tokens + candidate.uncached_tokens
        per_block = demand.prompt_tokens / max(candidate.prompt_blocks, 1)
        prefill = tokens / per_block
        decode = candidate.kv_blocks + candidate.prompt_blocks
        return {"prefill_blocks": prefill, "decode_blocks": decode, "total": prefill + decode}

    def score_decode(self, demand: Demand, candidate: Candidate) -> Terms:
        return {"total": float(candidate.kv_blocks)}
