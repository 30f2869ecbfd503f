"""A request in flight on a frontend: its attempts, what its client already has, and where it stands."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from serving.engine.base import MOST_PARKED, FinishReason, Mode, TokenLogprobs
from serving.errors import Unavailable
from serving.generation import GenerationInfo, GenerationRequest, Sink
from serving.wire import WIRE_VERSION, Message


@dataclass(slots=True)
class WorkerEntry:
    """A linked worker, as the coordinator needs it."""

    ident: str
    epoch: int
    address: str
    send: Callable[[Message], None]
    wire_version: int = WIRE_VERSION
    waiting: int | None = None  # its requests that do not run, as it last said
    parked: frozenset[int] | None = None  # attempts that only lack room there; None: it does not tell

    def parks(self, attempt: int) -> bool:
        """It lacks room there, for all that we know."""
        parked = self.parked
        return parked is not None and (attempt in parked or len(parked) >= MOST_PARKED)


class Stage(str, Enum):
    """Where a run stands; each stage has its own deadline."""

    QUEUE = "queue"  # sent, not yet scheduled
    PREFILL = "prefill"  # scheduled, no token yet
    TRANSFER = "transfer"  # prefill's token is out, its KV is not at the decode worker yet
    FIRST_DECODE = "first_token"  # the KV is there, decode's first token is not out
    DECODE = "decode"


@dataclass(slots=True)
class Attempt:
    ident: int
    worker: str
    mode: Mode
    computed: bool = False  # the prompt is; a prefill attempt is then its reader's business
    arrived: bool = False  # of a decode attempt: the KV is there
    handed_over: bool = False  # the target of a move goes on with it; only its end is still to be told


@dataclass(slots=True)
class Move:
    """A run on its way from one decode worker to another; it goes on at the source meanwhile, whose attempt
    ends when it has given the run up."""

    source: int  # attempts
    target: int
    since_s: float


class Run:
    """A request in flight; the Ticket its client side holds."""

    __slots__ = (
        "_cancel",
        "attempts",
        "deadline_s",
        "early",
        "ended",
        "failed_on",
        "failed_steps",
        "final",
        "handoff",
        "info",
        "last_s",
        "limit_s",
        "logprobs",
        "look_after_s",
        "move",
        "move_after_s",
        "next_position",
        "parked_s",
        "pending",
        "pending_logprobs",
        "placements",
        "predicted_ttft_s",
        "request",
        "requeues",
        "sent",
        "sink",
        "stage",
        "stage_s",
        "started_s",
        "tries",
        "waited_s",
        "waits_after",
    )  # fmt: skip

    def __init__(
        self, request: GenerationRequest, sink: Sink, now_s: float, cancel: Callable[[Run, str], None]
    ) -> None:
        self.request = request
        self.sink = sink
        self.info = GenerationInfo()
        self.attempts: dict[int, Attempt] = {}
        self.failed_on: set[str] = set()
        self.failed_steps = 0  # engines that raised while they computed it
        self.handoff = True  # False: workers that were to hand its KV over turned out not to be alike
        self.placements = 0
        self.tries = 0  # placements since a token was decoded
        self.requeues = 0  # placements because another worker would compute it sooner
        self.waited_s = 0.0  # on the workers that it was placed on before, for such a reason
        self.look_after_s = 0.0  # whether one would: not before
        self.waits_after: Unavailable | None = None  # why it was taken back, while no worker is there
        self.predicted_ttft_s: float | None = None  # by the router, at the last placement
        self.limit_s = float("inf")  # when its first token should be out, as admission said
        self.sent: array[int] = array("I")  # generated tokens the sink already has
        self.next_position = 0
        self.early: dict[int, tuple[int, TokenLogprobs | None]] = {}  # position -> token that overtook
        self.pending: list[int] = []  # in order, to be given to the sink with this frame
        self.pending_logprobs: list[TokenLogprobs] = []
        self.final: FinishReason | None = None  # the finish waits until the tokens before it are out
        self.ended = False
        self.move: Move | None = None
        self.move_after_s = 0.0  # no new move before
        self.logprobs = request.params.logprobs is not None
        self.started_s = now_s
        self.last_s = now_s
        self.stage = Stage.QUEUE
        self.stage_s = now_s
        self.parked_s = now_s  # when it was last known to lack only room
        self.deadline_s = float("inf")
        self._cancel = cancel

    @property
    def decoding(self) -> list[Attempt]:
        """The attempts that make its tokens, or are to: one, and the target of a move."""
        return [a for a in self.attempts.values() if a.mode is not Mode.PREFILL and not a.handed_over]

    def cancel(self, outcome: str = "cancelled") -> None:
        self._cancel(self, outcome)

    def take_early(self) -> None:
        """Append the tokens that waited for the one just appended."""
        while (waiting := self.early.pop(self.next_position, None)) is not None:
            token, logprobs = waiting
            self.pending.append(token)
            if self.logprobs and logprobs is not None:
                self.pending_logprobs.append(logprobs)
            self.next_position += 1

    def enter(self, stage: Stage, now_s: float) -> None:
        self.stage = stage
        self.stage_s = now_s
