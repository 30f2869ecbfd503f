"""What a worker shows: its engine's counters, block states and steps, its transfers and leases."""

from __future__ import annotations

from typing import Protocol

from decode.counters import MoveCounters
from serving.engine.base import Engine, Load, StepOutput
from serving.kv.transfer import TransferCounters
from serving.metrics import Labels, Registry

BATCH_BUCKETS = (0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)


class Measured(Protocol):
    """The parts of a worker that the metrics read."""

    engine: Engine

    @property
    def attempts(self) -> int: ...

    @property
    def leases(self) -> int: ...

    @property
    def reads_in_flight(self) -> int: ...

    @property
    def transfers(self) -> TransferCounters: ...

    @property
    def handoff_failures(self) -> int: ...

    @property
    def migrations(self) -> dict[str, MoveCounters]: ...

    @property
    def n_pulls(self) -> int: ...

    @property
    def pull_failures(self) -> int: ...


class WorkerMetrics:
    """Totals that engine and transfer count themselves are copied when a snapshot is made."""

    def __init__(self, registry: Registry, worker: Measured) -> None:
        self._worker = worker
        self.load: Load | None = None
        self.step_seconds = registry.histogram("step_seconds", "Engine steps")
        self.batch = registry.histogram("batch_size", "Sequences in the batch, by step", BATCH_BUCKETS)
        self.migration_pause = registry.histogram(
            "migration_pause_seconds", "Pauses of attempts that a peer took over or meant to"
        )
        self._live_handoffs = registry.counter(
            "live_handoffs", "Attempts that went on at a peer or were to", ("direction", "outcome")
        )
        self._totals = {
            name: registry.counter(name, help)
            for name, help in (
                ("prompt_tokens_computed", "Prompt tokens this engine computed"),
                ("prompt_tokens_cached", "Prompt tokens this engine found in its cache"),
                ("prompt_tokens_pulled", "Prompt tokens read from a peer's cache"),
                ("tokens_generated", "Tokens this engine drew"),
                ("preemptions", "Sequences put back because blocks ran out"),
                ("engine_steps", "Steps this engine took"),
                ("prefill_step_seconds", "Step time spent on prompt tokens"),
                ("decode_step_seconds", "Step time spent on decoding"),
                ("kv_content_checks", "Transferred blocks whose content was checked (sim)"),
                ("kv_content_errors", "Transferred blocks with wrong content (sim)"),
                ("engine_event_gaps", "Times KV events of the engine were lost (tensorrt_llm)"),
                ("engine_poll_errors", "Polls of the engine that failed (tensorrt_llm)"),
                ("engine_lost_transfers", "Hand-offs whose end the engine never told (tensorrt_llm)"),
                ("engine_deferred_aborts", "Cancels that waited for a transfer (tensorrt_llm)"),
                ("handoff_bytes", "KV bytes read from peers"),
                ("handoff_blocks", "KV blocks read from peers"),
                ("handoff_reads", "Reads from peers"),
                ("handoff_read_failures", "Reads from peers that failed"),
                ("handoff_read_seconds", "Time of reads from peers, summed"),
                ("handoff_failures", "Hand-offs that failed, for any reason"),
                ("live_handoff_bytes", "KV bytes read of attempts that were taken over live"),
                ("pulls", "Prefixes read from a peer's cache"),
                ("pull_failures", "Pulls that brought nothing, for any reason"),
            )
        }
        registry.before_snapshot(self._copy_totals)
        registry.gauge("kv_blocks", "KV blocks, by state", self._blocks, ("state",))
        registry.gauge("attempts", "Attempts in flight", lambda: {(): worker.attempts})
        registry.gauge("leases", "KV leases held for readers", lambda: {(): worker.leases})
        registry.gauge(
            "reads_in_flight", "Reads from peers under way", lambda: {(): worker.reads_in_flight}
        )
        registry.gauge("queue", "Sequences, by state", self._queue, ("state",))

    def on_step(self, output: StepOutput) -> None:
        load = output.load
        self.load = load
        if load.batch_tokens:
            self.step_seconds.observe(load.step_ms / 1e3)
            self.batch.observe(load.running)

    def _blocks(self) -> dict[Labels, float]:
        if self.load is None:
            return {}
        blocks = self.load.blocks
        states = ("used", "leased", "quarantined", "cached", "free")
        return {(state,): getattr(blocks, state) for state in states}

    def _queue(self) -> dict[Labels, float]:
        if self.load is None:
            return {}
        return {("running",): self.load.running, ("waiting",): self.load.waiting}

    def _copy_totals(self) -> None:
        engine = self._worker.engine.counters
        transfers = self._worker.transfers
        values = {
            "prompt_tokens_computed": engine.prompt_tokens_computed,
            "prompt_tokens_cached": engine.prompt_tokens_cached,
            "prompt_tokens_pulled": engine.prompt_tokens_pulled,
            "tokens_generated": engine.tokens_generated,
            "preemptions": engine.preemptions,
            "engine_steps": engine.steps,
            "prefill_step_seconds": engine.prefill_seconds,
            "decode_step_seconds": engine.decode_seconds,
            "kv_content_checks": engine.content_checks,
            "kv_content_errors": engine.content_errors,
            "engine_event_gaps": engine.event_gaps,
            "engine_poll_errors": engine.poll_errors,
            "engine_lost_transfers": engine.lost_transfers,
            "engine_deferred_aborts": engine.deferred_aborts,
            "handoff_bytes": transfers.bytes,
            "handoff_blocks": transfers.blocks,
            "handoff_reads": transfers.reads,
            "handoff_read_failures": transfers.failures,
            "handoff_read_seconds": transfers.seconds,
            "handoff_failures": self._worker.handoff_failures,
            "live_handoff_bytes": self._worker.migrations["in"].bytes,
            "pulls": self._worker.n_pulls,
            "pull_failures": self._worker.pull_failures,
        }
        for name, value in values.items():
            self._totals[name].set_total(value)
        for direction, moves in self._worker.migrations.items():
            for outcome, n in moves.outcomes.items():
                self._live_handoffs.set_total(n, (direction, outcome))
