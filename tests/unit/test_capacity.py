"""What a worker holds, worked out by hand, and which limit binds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serving.capacity import (
    GIB,
    Limits,
    Traffic,
    WorkerSpec,
    activation_bytes,
    memory_of,
    plan,
    plan_pool,
    step_floor_ms,
)
from serving.errors import ConfigError
from serving.footprint import KvCost, Placement, Precision
from serving.gpu_catalog import CATALOG, find_gpu, identify
from serving.quantization import ALGORITHMS
from tests.unit.test_footprint import shape

LIMITS = Limits(max_batch=76, step_tokens=8192, context_tokens=8192, block_tokens=32, kv_fraction=0.85)
BASELINE = WorkerSpec(
    shape("llama-3.1-8b"), Precision(None, "bfloat16", "bfloat16"), Placement(), LIMITS, find_gpu("H100-80")
)
CHAT = Traffic(prompt_tokens=4096, output_tokens=512)


def fp8(model: str, tensor: int, gpu: str, **limits: int) -> WorkerSpec:
    return WorkerSpec(
        shape(model),
        Precision(ALGORITHMS["FP8"], "bfloat16", "fp8"),
        Placement(tensor),
        replace(LIMITS, **limits),
        find_gpu(gpu),
    )


def test_the_baseline_by_hand() -> None:
    """An 8B Llama at 16 bits on one H100."""
    # a token of a step: four hidden vectors 16,384, q, k, v 48*128 = 6,144, MLP 3*14336 = 43,008: 65,536
    # values of 2 bytes; 8,192 tokens; and 76 * 128,256 logits of 8 bytes
    assert activation_bytes(BASELINE) == 8192 * 131_072 + 76 * 128_256 * 8  # 1,151,721,472
    memory = memory_of(BASELINE)
    assert memory is not None
    # 81,559 MiB - 2 GiB - 16,060,522,496 - 1,151,721,472 = 66,161,082,368 free; 0.85 of it
    assert (memory.card, memory.weights) == (85_520_809_984, 16_060_522_496)
    assert memory.kv == 56_236_920_012
    held = plan(BASELINE, CHAT)
    # a block 32 * 131,072 = 4 MiB: 13,407 of them. 4,608 tokens are 144 blocks, 603,979,776 bytes:
    # 93 fit, and 77 with 20 % more each
    assert (held.blocks, held.tokens) == (13_407, 429_024)
    assert (held.sequences, held.sequences_with_headroom) == (93, 77)
    assert (held.holds, held.binds, held.enough) == (76, "max_batch", True)
    assert held.kv_use == pytest.approx(76 / 93)
    # a step reads 16.06 GB and the KV of 76 sequences, half grown: 22.95 GB; at 3,350 GB/s
    assert held.step_floor_ms == pytest.approx((16_060_522_496 + 76 * 603_979_776 / 2) / 3.35e9)


BINDS = {
    "batch": (BASELINE, CHAT, "max_batch", 76),
    "KV": (replace(BASELINE, limits=replace(LIMITS, max_batch=200)), CHAT, "KV memory", 77),
    "length": (BASELINE, Traffic(8000, 512), "sequence length", 0),
    "weights": (replace(BASELINE, gpu=find_gpu("L4"), shape=shape("qwen3-32b")), CHAT, "weights", 0),
}


@pytest.mark.parametrize(("worker", "traffic", "binds", "holds"), BINDS.values(), ids=BINDS)
def test_which_limit_binds(worker: WorkerSpec, traffic: Traffic, binds: str, holds: int) -> None:
    held = plan(worker, traffic)
    assert (held.binds, held.holds) == (binds, holds)
    assert held.enough == (binds == "max_batch")


# (worker, free bytes of a GPU, sequences). Free = card - runtime - weights - activations; KV is 0.85 of it,
# and a sequence takes 4,608 tokens * KV bytes * 1.2. Activations: values * 2 bytes * 8,192, and logits.
TABLE = {
    # 85,520,809,984 - 3 GiB - 36,329,504,768 - (32,768 + 5,120 + 43,008) * 16,384 - 38,989,824;
    # 37,914,836,377 / (4,608 * 81,920 * 1.2) = 83.7
    "70B, FP8, TP2, H100": (fp8("llama-3.1-70b", 2, "H100-80"), 44_605_689_856, 83),
    # 150,754,820,096 - 3 GiB - 9,084,354,560 - (32,768 + 1,280 + 10,752) * 16,384 - 9,747,456;
    # 117,049,665,996 / (4,608 * 20,480 * 1.2) = 1033.6
    "70B, FP8, TP8, H200": (fp8("llama-3.1-70b", 8, "H200"), 137_705_489_408, 1033),
    # weights 31,205,621,760 + 2 * 1,556,501,504 = 34,318,624,768; values 20,480 + 10,240 + 76,800;
    # 95,569,517,875 / (4,608 * 131,072 * 1.2) = 131.9
    "Qwen3-32B, FP8, H200": (fp8("qwen3-32b", 1, "H200"), 112_434_726_912, 131),
    # weights 46,439,333,888 + 2 * 263,458,816 = 46,966,251,520; a token goes to 2 experts,
    # 2 * (8,192 + 43,008) values beside 16,384 + 6,144; 29,189,678,694 / (4,608 * 65,536 * 1.2) = 80.5
    "Mixtral, FP8, H100": (fp8("mixtral-8x7b", 1, "H100-80"), 34_340_798_464, 80),
}


@pytest.mark.parametrize(("worker", "free", "sequences"), TABLE.values(), ids=TABLE)
def test_models_on_gpus(worker: WorkerSpec, free: int, sequences: int) -> None:
    held = plan(worker, CHAT)
    memory = held.memory
    assert memory is not None
    assert memory.card - memory.runtime - memory.weights - memory.activations == free
    assert memory.kv == int(0.85 * free)
    assert held.sequences_with_headroom == sequences


def test_latent_attention_is_divided_by_sequence() -> None:
    """R1 on 8 H200: with attention apart each GPU keeps 70,272 bytes a token of its own sequences only."""
    limits = replace(LIMITS, max_batch=2048, kv_fraction=0.8)
    precision = Precision(ALGORITHMS["FP8_BLOCK_SCALES"], "bfloat16", "bfloat16")
    together = WorkerSpec(shape("deepseek-r1"), precision, Placement(8), limits, find_gpu("H200"))
    apart = replace(together, place=Placement(8, attention_dp=True))
    a, b = plan(together, CHAT), plan(apart, CHAT)
    assert a.memory is not None
    assert b.memory is not None
    assert a.kv.token_bytes == b.kv.token_bytes == 70_272
    assert a.tokens == a.memory.kv // (32 * 70_272) * 32
    assert b.tokens == 8 * (b.memory.kv // (32 * 70_272)) * 32
    assert b.sequences > 5 * a.sequences  # not 8: all of attention is on each GPU


def test_transfer_buffers_come_on_top() -> None:
    """Two of 8,192 tokens of 128 KiB: 2 GiB, and the KV is as it was."""
    buffered = replace(BASELINE, limits=replace(LIMITS, transfer_tokens=8192))
    before, after = memory_of(BASELINE), memory_of(buffered)
    assert before is not None
    assert after is not None
    assert (after.transfer, after.kv, before.left - after.left) == (2 * GIB, before.kv, 2 * GIB)


def test_traffic_is_spread_over_workers() -> None:
    pool = Traffic(4096, 512, concurrency=200, workers=3)
    assert plan(BASELINE, pool).wanted == 67  # 66.7
    assert plan(BASELINE, pool).enough
    assert not plan(BASELINE, replace(pool, workers=2)).enough


def test_a_pool_without_a_model() -> None:
    """64 bytes a token, 4 MiB: 65,536 tokens; 14 sequences of 4,608, 11 with head-room."""
    held = plan_pool(KvCost(64, 0, None, 16), 4 << 20, replace(LIMITS, block_tokens=16), CHAT)
    assert (held.tokens, held.sequences, held.sequences_with_headroom) == (65_536, 14, 11)
    assert (held.memory, held.parameters, held.binds) == (None, None, "KV memory")


def test_a_small_batch_reads_few_experts() -> None:
    """Mixtral alone goes to 2 of 8 experts; of 32 sequences nearly none is left out."""
    worker = fp8("mixtral-8x7b", 1, "H200")
    alone, many = step_floor_ms(worker, 1, 32), step_floor_ms(worker, 32, 32)
    assert alone is not None
    assert many is not None
    # 13 G of 46.7 G parameters are active; KV of 32 tokens is nothing
    assert alone / many == pytest.approx(12.9 / 46.7, abs=0.03)


# ---------------------------------------------------------------- GPUs


NAMES = {"H200": "H200-141", "h100-80": "H100-80", "NVIDIA B200": "B200", "a100_40": "A100-40"}


@pytest.mark.parametrize(("name", "found"), NAMES.items())
def test_a_gpu_by_name(name: str, found: str) -> None:
    assert find_gpu(name).name == found


BAD_NAMES = {"V100": "no such GPU; known: A10", "A100": "which one? A100-40 or A100-80"}


@pytest.mark.parametrize(("name", "said"), BAD_NAMES.items())
def test_a_gpu_nobody_knows(name: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_gpu(name)
    assert said in caught.value.message
    assert "\n" not in caught.value.message


DEVICES = {
    ("NVIDIA H200", 143_771): "H200-141",
    ("NVIDIA H100 80GB HBM3", 81_559): "H100-80",
    ("NVIDIA H100 NVL", 95_830): "H100-94",
    ("NVIDIA A100-SXM4-40GB", 40_536): "A100-40",
    ("NVIDIA A100-SXM4-80GB", 81_920): "A100-80",
    ("NVIDIA A10G", 23_028): "A10",
    ("NVIDIA GH200 480GB", 97_871): "GH200-96",
    ("NVIDIA GB200", 189_471): "GB200",
    ("NVIDIA B300 SXM6 AC", 275_040): "B300",
    ("NVIDIA L40S", 46_068): "L40S",
    ("Tesla V100-SXM2-16GB", 16_384): None,
    ("NVIDIA H200", 20_000): None,  # a slice of one
}


@pytest.mark.parametrize(("device", "expected"), DEVICES.items(), ids=str)
def test_a_gpu_as_the_driver_names_it(device: tuple[str, int], expected: str | None) -> None:
    found = identify(device[0], device[1] << 20)
    assert (found.name if found else None) == expected


def test_the_catalogue_has_each_name_once() -> None:
    assert len({gpu.name for gpu in CATALOG}) == len(CATALOG)
