"""The decode pool as a Serve deployment: workers that read a prompt's KV and generate; alone they do both."""

from __future__ import annotations

from functools import partial

from serving.worker import worker_deployment

decode_deployment = partial(worker_deployment, role="decode")
