"""What this engine can do, as the door needs to know it; the rest falls back as the seam says."""

from __future__ import annotations

from serving.config import TrtllmConfig
from serving.engine.base import Capabilities


def capabilities_of(config: TrtllmConfig) -> Capabilities:
    """A whole prompt is handed over at once, a sampled resume is marked, live requests do not migrate,
    blocks are free or not, whatever they hold; that a prompt has begun is seen when it ends."""
    return Capabilities(
        streamed_handoff=False,
        seeded_resume=False,
        logit_bias=False,
        block_states=False,
        migrate_kv=False,
        moves_kv=True,
        tells_begun=False,
        guided=config.guided_backend is not None,
    )
