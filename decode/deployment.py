"""The decode pool of a variant as a Serve deployment."""

from __future__ import annotations

from typing import Any

from serving.config import Deadlines, Variant
from serving.worker import worker_deployment


def decode_deployment(
    name: str,
    args: dict[str, Any],
    model: str,
    variant: Variant,
    replicas: int,
    control: Any,
    deadlines: Deadlines,
) -> Any:
    """Workers that read a prompt's KV and generate; without prefill workers they do both."""
    return worker_deployment(
        name=name,
        args=args,
        model=model,
        variant=variant,
        role="decode",
        pool=variant.decode,
        replicas=replicas,
        control=control,
        deadlines=deadlines,
    )
