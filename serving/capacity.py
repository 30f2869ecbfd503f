"""How much a worker holds: memory of each GPU, KV blocks, sequences, and which limit binds. Pure.

Weights and KV are exact (serving.footprint). What else takes memory (`RUNTIME_BYTES`, `activation_bytes`)
is an estimate and said to be one. docs/capacity.md has the formulas and worked examples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from serving.footprint import KvCost, Placement, Precision, kv_cost, parameter_count, weights_bytes
from serving.gpu_catalog import GpuType
from serving.model_shape import ModelShape
from serving.quantization import DTYPE_BYTES

GIB = 1 << 30
# CUDA context, kernels, graphs and workspaces of a GPU; with NCCL's buffers where it has peers.
RUNTIME_BYTES = 2 * GIB
RUNTIME_PEERS_BYTES = 3 * GIB
TRANSFER_BUFFERS = 2  # of the engine's transceiver: one to send, one to receive
LOGIT_BYTES = 8  # a logit in 32 bits, and its probability


@dataclass(frozen=True, slots=True)
class Limits:
    """The engine's own. `kv_bytes` fixes each GPU's KV pool; else it becomes `kv_fraction` of what is free
    beside weights and activations."""

    max_batch: int  # most sequences of one step
    step_tokens: int  # most tokens of one step
    context_tokens: int  # most tokens of one sequence
    block_tokens: int
    kv_bytes: int | None = None
    kv_fraction: float | None = None
    transfer_tokens: int = 0  # of the transceiver's buffers
    reserve_bytes: int | None = None  # instead of RUNTIME_BYTES


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker, as configured. `gpu`: the type of its cards; None when unknown, or when it has none."""

    shape: ModelShape
    precision: Precision
    place: Placement
    limits: Limits
    gpu: GpuType | None = None


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a pool should hold: `concurrency` sequences at once (p95 of the traffic) over `workers`, each as
    long as the p99, and `headroom` (a share) on top."""

    prompt_tokens: int
    output_tokens: int
    concurrency: int | None = None  # None: as many as the workers' batches take
    headroom: float = 0.2
    workers: int = 1

    @property
    def sequence_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one GPU, in bytes."""

    card: int
    runtime: int  # estimate
    weights: int
    activations: int  # estimate
    transfer: int
    kv: int  # negative: so much is missing before there is any KV

    @property
    def left(self) -> int:
        return self.card - self.runtime - self.weights - self.activations - self.transfer - max(0, self.kv)

    @property
    def used_share(self) -> float:
        return 1 - self.left / self.card


@dataclass(frozen=True, slots=True)
class Capacity:
    """Of one worker; bytes are those of each of its GPUs."""

    parameters: int | None  # None: a simulated model
    weights_bytes: int | None
    memory: Memory | None  # None: the GPU is not known, or there is none
    kv: KvCost
    kv_bytes: int
    blocks: int
    tokens: int  # that all blocks hold
    sequence_tokens: int
    sequences: int  # of that length that the KV holds
    sequences_with_headroom: int
    max_batch: int
    wanted: int  # sequences each worker gets
    binds: str  # weights | sequence length | KV memory | max_batch
    step_floor_ms: float | None  # of a decode step with `holds` sequences; None without a known GPU

    @property
    def holds(self) -> int:
        """Sequences that the worker takes at once, with head-room."""
        if self.binds in ("weights", "sequence length"):
            return 0
        return min(self.sequences_with_headroom, self.max_batch)

    @property
    def enough(self) -> bool:
        return self.holds >= self.wanted

    @property
    def kv_use(self) -> float:
        """Share of the KV in use when the worker runs what it is wanted to, as far as its batch goes."""
        running = min(self.wanted, self.max_batch)
        return min(1.0, running / self.sequences) if self.sequences else 1.0


def activation_bytes(worker: WorkerSpec) -> int:
    """Estimate of the peak of one step: for each token four vectors of the hidden width, q, k and v and the
    inner ones of the MLP (of each expert that it goes to), and the logits of a whole batch."""
    shape, place, limits = worker.shape, worker.place, worker.limits
    divided = 1 if place.attention_dp else place.tensor
    inner = shape.mlp_width / divided
    if experts := shape.experts:
        routed = experts.active * (2 * shape.hidden + 3 * experts.width / place.tensor) / 3
        inner = max(inner, routed + experts.shared_width / divided)
    attention = (shape.heads + 2 * shape.kv_heads) * shape.head_dim / divided
    element = DTYPE_BYTES[worker.precision.dtype]
    token = (4 * shape.hidden + attention + 3 * inner) * element
    logits = limits.max_batch * shape.vocab * LOGIT_BYTES / divided
    return math.ceil(limits.step_tokens * token + logits)


def memory_of(worker: WorkerSpec) -> Memory | None:
    """Where the memory of a GPU goes; None without a known GPU. TensorRT-LLM takes its fraction of what is
    free after loading and a dry run; the transceiver's buffers come on top."""
    gpu, limits = worker.gpu, worker.limits
    if gpu is None:
        return None
    runtime = limits.reserve_bytes
    if runtime is None:
        runtime = RUNTIME_PEERS_BYTES if worker.place.gpus > 1 else RUNTIME_BYTES
    weights = weights_bytes(worker.shape, worker.precision, worker.place)
    activations = activation_bytes(worker)
    free = gpu.memory_bytes - runtime - weights - activations
    transfer = math.ceil(limits.transfer_tokens * _kv_cost(worker).token_bytes) * TRANSFER_BUFFERS
    if limits.kv_bytes is not None:
        pool = limits.kv_bytes
    else:
        pool = math.floor(free * (limits.kv_fraction or 1.0)) if free > 0 else free
    return Memory(gpu.memory_bytes, runtime, weights, activations, transfer, pool)


def plan(worker: WorkerSpec, traffic: Traffic) -> Capacity:
    """What `worker` holds of `traffic`."""
    kv = _kv_cost(worker)
    memory = memory_of(worker)
    kv_bytes = memory.kv if memory is not None else worker.limits.kv_bytes or 0
    held = plan_pool(kv, kv_bytes, worker.limits, traffic, ranks=_ranks(worker))
    return replace(
        held,
        parameters=parameter_count(worker.shape),
        weights_bytes=weights_bytes(worker.shape, worker.precision, worker.place),
        memory=memory,
        binds="weights" if memory is not None and (memory.kv <= 0 or memory.left < 0) else held.binds,
        step_floor_ms=step_floor_ms(worker, held.holds, traffic.sequence_tokens),
    )


def plan_pool(kv: KvCost, kv_bytes: int, limits: Limits, traffic: Traffic, *, ranks: int = 1) -> Capacity:
    """What a KV pool of `kv_bytes` on each of `ranks` GPUs, with sequences of their own, holds."""
    blocks = max(0, math.floor(kv_bytes / kv.block_bytes)) * ranks
    one = kv.sequence_bytes(traffic.sequence_tokens)
    with_headroom = max(0, math.floor(kv_bytes / (one * (1 + traffic.headroom)))) * ranks
    wanted = limits.max_batch
    if traffic.concurrency is not None:
        wanted = math.ceil(traffic.concurrency / traffic.workers)
    binds = "KV memory" if with_headroom < limits.max_batch else "max_batch"
    return Capacity(
        parameters=None,
        weights_bytes=None,
        memory=None,
        kv=kv,
        kv_bytes=kv_bytes,
        blocks=blocks,
        tokens=blocks * limits.block_tokens,
        sequence_tokens=traffic.sequence_tokens,
        sequences=max(0, math.floor(kv_bytes / one)) * ranks,
        sequences_with_headroom=with_headroom,
        max_batch=limits.max_batch,
        wanted=wanted,
        binds="sequence length" if traffic.sequence_tokens > limits.context_tokens else binds,
        step_floor_ms=None,
    )


def step_floor_ms(worker: WorkerSpec, batch: int, sequence_tokens: int) -> float | None:
    """The least that a decode step of `batch` sequences takes: the memory's bandwidth over what it reads.

    That is every weight once (of experts, those that any token of the batch goes to) and the KV of the
    sequences, half grown: `sequence_tokens` is where the longest of them end. Stages of a pipeline follow
    one another.
    """
    if worker.gpu is None or not batch:
        return None
    shape = worker.shape
    weights = weights_bytes(shape, worker.precision, worker.place)
    read = float(weights)
    if experts := shape.experts:
        idle = (1 - experts.active / experts.routed) ** batch
        matrices = 3 if shape.gated else 2
        of_experts = matrices * shape.hidden * experts.routed * experts.width * experts.layers
        read -= idle * weights * of_experts / parameter_count(shape)
    read += batch / _ranks(worker) * _kv_cost(worker).sequence_bytes(sequence_tokens) / 2
    return read * worker.place.pipeline / (worker.gpu.bandwidth_gb_s * 1e9) * 1e3


def _kv_cost(worker: WorkerSpec) -> KvCost:
    return kv_cost(worker.shape, worker.precision.kv, worker.place, worker.limits.block_tokens)


def _ranks(worker: WorkerSpec) -> int:
    """GPUs that hold sequences of their own."""
    return worker.place.tensor if worker.place.attention_dp else 1
