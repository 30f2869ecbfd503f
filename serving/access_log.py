"""One log record a finished generation: logger `kvrelay.access`, what happened as its fields."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, fields

from serving.responder import Response

_log = logging.getLogger("kvrelay.access")


@dataclass(slots=True)
class AccessRecord:
    """What happened to one generation request; None is "did not come to that"."""

    request_id: str
    endpoint: str
    started_at: float  # loop time
    tenant: str | None = None
    model: str | None = None
    variant: str | None = None
    stream: bool = False
    status: int | None = None  # HTTP status; 200 also for a stream that failed later, see `error`
    error: str | None = None  # the error's code or type
    client_left: bool = False
    finish: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    ttft_s: float | None = None
    duration_s: float | None = None
    prefill_worker: str | None = None
    decode_worker: str | None = None
    resumes: int = 0

    def take(self, response: Response) -> None:
        """Note what the response knows of itself, and of the workers that made it."""
        usage = response.usage
        self.prompt_tokens = usage.prompt_tokens
        self.cached_tokens = usage.cached_tokens
        self.completion_tokens = usage.completion_tokens
        self.finish = response.finish
        if response.error is not None:
            self.error = response.error.code or response.error.type
        if response.first_token_at is not None:
            self.ttft_s = response.first_token_at - self.started_at
        ticket = response.choices[0].ticket
        if ticket is not None:
            self.variant = ticket.info.variant
            self.prefill_worker = ticket.info.prefill_worker
            self.decode_worker = ticket.info.decode_worker
            self.resumes = ticket.info.resumes

    def ended(self, status: int) -> None:
        self.status = status
        self.duration_s = asyncio.get_running_loop().time() - self.started_at


_LOGGED = [field.name for field in fields(AccessRecord) if field.name != "started_at"]


def log_access(record: AccessRecord) -> None:
    if _log.isEnabledFor(logging.INFO):
        _log.info("request", extra={"fields": {name: getattr(record, name) for name in _LOGGED}})
