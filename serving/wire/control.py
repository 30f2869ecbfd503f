"""Messages between Control and the other processes of an application (parties)."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from serving.wire.base import Message


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
    samples: list[Sample]


class MetricsPull(Message, tag="metrics?"):
    """Control -> party: send a snapshot now."""

    serial: int


class MetricsPush(Message, tag="metrics"):
    """Party -> control: my whole state; replaces the one before."""

    serial: int
    families: list[Family]


class ScrapeRequest(Message, tag="scrape?"):
    """Frontend -> control: the metrics of the whole application."""

    serial: int


class ScrapeReply(Message, tag="scrape"):
    serial: int
    families: list[Family]


class Settings(Message, tag="settings"):
    """Control -> party: live settings, whole; `version` grows."""

    version: int
    values: dict[str, Any]


class Members(Message, tag="members"):
    """Control -> party: who is registered (ident -> kind and labels)."""

    version: int
    parties: list[Register]


class Orders(Message, tag="orders"):
    """Control -> party: what single workers are told to do, whole; `version` grows.

    Kept apart from Settings: they name processes and die with them.
    """

    since: ClassVar[int] = 2
    version: int
    draining: list[str]  # idents of workers
    roles: dict[str, str]  # ident -> prefill | decode, of workers that are lent to the other pool


class AdminRequest(Message, tag="admin?"):
    """Frontend -> control: what an operator asked for at its door."""

    since: ClassVar[int] = 2
    serial: int
    verb: str
    arguments: dict[str, Any]


class AdminReply(Message, tag="admin"):
    """`status`: of the HTTP answer; `body`: JSON-able."""

    since: ClassVar[int] = 2
    serial: int
    status: int
    body: dict[str, Any]
