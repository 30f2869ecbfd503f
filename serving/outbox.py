"""What one frontend gets with a worker's next frame."""

from __future__ import annotations

from dataclasses import dataclass, field

from serving.wire import Begun, Ended, Events, LoadReport, Logprobs, Step, Tokens, pack_u32, pack_u64


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
