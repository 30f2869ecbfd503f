"""Messages between Control and the other processes of an application (parties)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec

from serving.wire.base import Message
from serving.wire.fields import FEW, MANY, U64, Amount


class Register(Message, tag="register"):
    """Party -> control, first message after the handshake; repeated when something changes."""

    kind: str  # frontend | worker
    ident: str
    labels: dict[str, str]  # model, variant, pool, ...
    address: str | None = None


class Sample(msgspec.Struct, array_like=True):
    suffix: str  # "", "_total", "_bucket", "_sum", "_count"
    labels: dict[str, str]
    value: float


class Family(msgspec.Struct, array_like=True):
    name: str
    type: str  # counter | gauge | histogram
    help: str
    samples: Annotated[list[Sample], MANY]


class MetricsPull(Message, tag="metrics?"):
    """Control -> party: send a snapshot now."""

    serial: U64


class MetricsPush(Message, tag="metrics"):
    """Party -> control: my whole state; replaces the one before."""

    serial: U64
    families: Annotated[list[Family], FEW]


class ScrapeRequest(Message, tag="scrape?"):
    """Frontend -> control: the metrics of the whole application."""

    serial: U64


class ScrapeReply(Message, tag="scrape"):
    serial: U64
    families: Annotated[list[Family], FEW]


class Settings(Message, tag="settings"):
    """Control -> party: live settings, whole; `version` grows."""

    version: U64
    values: dict[str, Any]


class Members(Message, tag="members"):
    """Control -> party: who is registered (ident -> kind and labels)."""

    version: U64
    parties: Annotated[list[Register], MANY]


class Orders(Message, tag="orders"):
    """Control -> party: what single workers are told to do, whole; `version` grows.

    Kept apart from Settings: they name processes and die with them.
    """

    since: ClassVar[int] = 2
    version: U64
    draining: Annotated[list[str], FEW]  # idents of workers
    roles: dict[str, str]  # ident -> prefill | decode, of workers that are lent to the other pool


class WorkerReport(Message, tag="report"):
    """Worker -> control, about once a second: how it stands. Totals count since the process started."""

    since: ClassVar[int] = 2
    role: str  # what it plays now
    draining: bool
    busy: bool  # somebody waits for its tokens, reads its KV, or may still write into it
    attempts: U64
    leases: U64
    running: U64
    waiting: U64
    waiting_tokens: U64  # of prompts, still to compute
    free_blocks: U64
    total_blocks: U64
    step_ms: Amount
    prompt_tokens: U64  # computed, in all
    generated_tokens: U64  # in all


class ArrivalRow(msgspec.Struct, array_like=True):
    """A request at admission, `age_ms` before the report was made."""

    age_ms: Amount
    prompt_tokens: U64
    uncached_tokens: U64
    slo_class: str | None = None


class Fitted(msgspec.Struct, array_like=True):
    """Coefficients of kvrouter.perf_model, from the workers this frontend knows best."""

    prefill: tuple[float, float, float]
    step: tuple[float, float, float]
    prefill_spread: Amount
    step_spread: Amount
    samples: U64  # of the less well known of the two


class FrontendReport(Message, tag="demand"):
    """Frontend -> control, about twice a second and variant: what came since the report before, what is."""

    since: ClassVar[int] = 2
    model: str
    variant: str
    arrivals: Annotated[list[ArrivalRow], MANY]
    outputs: Annotated[list[tuple[int, int]], MANY]  # (prompt, output) tokens of answers
    queued: U64  # requests without a first token
    queue_age_ms: Amount  # of the oldest of them
    decoding: U64
    fitted: Fitted | None = None
    # (prompt, output so far) tokens of the answers that are not complete (since 2).
    going: Annotated[list[tuple[int, int]], MANY] | None = None


class AdminRequest(Message, tag="admin?"):
    """Frontend -> control: what an operator asked for at its door."""

    since: ClassVar[int] = 2
    serial: U64
    verb: str
    arguments: dict[str, Any]


class AdminReply(Message, tag="admin"):
    """`status`: of the HTTP answer; `body`: JSON-able."""

    since: ClassVar[int] = 2
    serial: U64
    status: int
    body: dict[str, Any]
