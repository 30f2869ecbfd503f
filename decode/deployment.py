"""The decode pool as a Serve deployment: workers that read KV and generate; alone they prefill too."""

from __future__ import annotations

from functools import partial

from serving.worker import worker_deployment

decode_deployment = partial(worker_deployment, role="decode")
