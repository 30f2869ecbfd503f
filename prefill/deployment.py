"""The prefill pool of a variant as a Serve deployment."""

from __future__ import annotations

from typing import Any

from serving.config import Deadlines, Variant
from serving.worker import worker_deployment


def prefill_deployment(
    name: str,
    args: dict[str, Any],
    model: str,
    variant: Variant,
    replicas: int,
    control: Any,
    deadlines: Deadlines,
) -> Any:
    """Workers that compute prompts and hold their KV until its reader has it."""
    return worker_deployment(
        name=name,
        args=args,
        model=model,
        variant=variant,
        role="prefill",
        pool=variant.prefill,
        replicas=replicas,
        control=control,
        deadlines=deadlines,
    )
