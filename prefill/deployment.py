"""The prefill pool as a Serve deployment: workers that compute prompts and keep the KV for its reader."""

from __future__ import annotations

from functools import partial

from serving.worker import worker_deployment

prefill_deployment = partial(worker_deployment, role="prefill")
