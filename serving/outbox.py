"""What one frontend gets with a worker's next frame."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from serving.engine.base import StepOutput
from serving.link import Link
from serving.wire import (
    Begun,
    Ended,
    Events,
    LoadReport,
    Logprobs,
    Step,
    Stored,
    Tokens,
    pack_u32,
    pack_u64,
)


@dataclass(slots=True)
class Outbox:
    """What one frontend gets with the next frame."""

    attempts: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    begun: list[Begun] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)

    def frame(self, events: Events | None, load: LoadReport | None) -> Step | None:
        if not (self.tokens or self.begun or self.ended or events or load):
            return None
        tokens = None
        if self.tokens:
            tokens = Tokens(pack_u64(self.attempts), pack_u32(self.positions), pack_u32(self.tokens))
        return Step(
            tokens=tokens,
            logprobs=self.logprobs or None,
            begun=self.begun or None,
            ended=self.ended or None,
            events=events,
            load=load,
        )


class Outgoing:
    """One frame for every frontend, from one or more engine steps; KV events are the same for all."""

    def __init__(self, links: Iterable[Link]) -> None:
        self.outboxes = {link: Outbox() for link in links}
        self._stored: list[Stored] = []
        self._removed: list[int] = []
        self._fresh: set[int] = set()  # hashes in `_stored`

    def undone_by(self, output: StepOutput) -> bool:
        """A block stored in this frame is removed by `output`: readers apply removals first, so the two
        must not share a frame."""
        return bool(output.removed and self._fresh and not self._fresh.isdisjoint(output.removed))

    def add_events(self, output: StepOutput) -> None:
        for run in output.stored:
            self._stored.append(Stored(run.parent, pack_u64(list(run.hashes))))
            self._fresh.update(run.hashes)
        self._removed.extend(output.removed)

    @property
    def has_events(self) -> bool:
        return bool(self._stored or self._removed)

    def events(self, seq: int) -> Events:
        return Events(seq, self._stored, pack_u64(self._removed))
