"""What Serve calls the deployments of an application."""

from __future__ import annotations

FRONTEND = "Frontend"


def deployment_name(model: str, variant: str, role: str) -> str:
    """Of a pool. Serve names may not hold every character a model name may."""
    clean = "".join(c if c.isalnum() or c in "-_." else "-" for c in f"{model}-{variant}")
    return f"{clean}-{role}"
