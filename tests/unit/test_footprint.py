"""Weights and KV bytes of five published models, worked out by hand.

Parameters of a layer without experts: q and o take hidden * heads * head_dim each, k and v
hidden * kv_heads * head_dim each, a gated MLP 3 * hidden * width; two norms of hidden. Beside the layers:
embedding and head, vocab * hidden each, and the last norm.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from serving.footprint import KvCost, Placement, Precision, kv_cost, parameter_count, weights_bytes
from serving.model_shape import ModelShape, read_shape
from serving.quantization import ALGORITHMS

SHAPES = Path(__file__).parents[1] / "fixtures" / "shapes"


def shape(name: str) -> ModelShape:
    return read_shape(SHAPES / f"{name}.json")


PARAMETERS = {
    # q, o 2*576*576 = 663,552; k, v 2*576*192 = 221,184; MLP 3*576*1536; norms 1,152; 30 times.
    # The head is the embedding: 49152*576 once
    "smollm2-135m": 30 * (663_552 + 221_184 + 2_654_208 + 1_152) + 28_311_552 + 576,  # 134,515,008
    # q, o 2*4096*4096 = 33,554,432; k, v 2*4096*1024 = 8,388,608; MLP 3*4096*14336 = 176,160,768:
    # 218,103,808 a layer and 8,192 of norms, 32 times; 2*128256*4096 = 1,050,673,152; 4,096
    "llama-3.1-8b": 32 * (218_103_808 + 8_192) + 1_050_673_152 + 4_096,  # 8,030,261,248
    # 134,217,728 + 16,777,216 + 704,643,072 = 855,638,016 and 16,384, 80 times; 2*128256*8192; 8,192
    "llama-3.1-70b": 80 * (855_638_016 + 16_384) + 2_101_346_304 + 8_192,  # 70,553,706,496
    # heads 64 of 128, wider than hidden: q, o 2*5120*8192 = 83,886,080; k, v 10,485,760; MLP 393,216,000:
    # 487,587,840; norms 10,240 and 256 of q and k; 64 times; 2*151936*5120; 5,120
    "qwen3-32b": 64 * (487_587_840 + 10_496) + 1_555_824_640 + 5_120,  # 32,762,123,264
    # attention as the 8B Llama: 41,943,040; 8 experts of 3*4096*14336; router 4096*8; norms 8,192; 32 times
    "mixtral-8x7b": 32 * (41_943_040 + 8 * 176_160_768 + 32_768 + 8_192) + 262_144_000 + 4_096,
    # q down 7168*1536 = 11,010,048, q up 1536*128*192 = 37,748,736; KV down 7168*576 = 4,128,768, up
    # 512*128*256 = 16,777,216; o 128*128*7168 = 117,440,512: 187,105,280; norms 2,048 and 14,336; 61 times.
    # 3 dense MLPs of 3*7168*18432 = 396,361,728. 58 times 256+1 experts of 3*7168*2048 = 44,040,192, the
    # router 7168*256 and its bias. 2*129280*7168; 7,168. As its card says: 671 G, without the MTP layer.
    "deepseek-r1": 61 * (187_105_280 + 2_048 + 14_336)
    + 3 * 396_361_728
    + 58 * (257 * 44_040_192 + 1_835_008 + 256)
    + 1_853_358_080
    + 7_168,  # 671,026,419,200
}


@pytest.mark.parametrize(("name", "expected"), PARAMETERS.items(), ids=PARAMETERS)
def test_parameters(name: str, expected: int) -> None:
    assert parameter_count(shape(name)) == expected


def test_published_totals() -> None:
    """The same, as the models' cards give them."""
    published = {name: f"{parameter_count(shape(name)) / 1e9:.1f}" for name in PARAMETERS}
    assert published == {
        "smollm2-135m": "0.1",
        "llama-3.1-8b": "8.0",
        "llama-3.1-70b": "70.6",
        "qwen3-32b": "32.8",
        "mixtral-8x7b": "46.7",
        "deepseek-r1": "671.0",
    }


BF16, FP8 = "NO_QUANT", "FP8"
WEIGHTS = {
    # all 8,030,261,248 at 2 bytes
    "8B, 16 bits": ("llama-3.1-8b", BF16, Placement(), 2 * 8_030_261_248),
    # linear 32*218,103,808 at 1 byte; the rest, 1,050,939,392, at 2
    "8B, FP8": ("llama-3.1-8b", FP8, Placement(), 6_979_321_856 + 2 * 1_050_939_392),
    # linear 80*855,638,016/2 at 1; norms 80*16,384 + 8,192 whole, embedding and head halved, at 2
    "70B, FP8, TP2": ("llama-3.1-70b", FP8, Placement(2), 34_225_520_640 + 2 * (1_318_912 + 1_050_673_152)),
    "70B, FP8, TP8": ("llama-3.1-70b", FP8, Placement(8), 8_556_380_160 + 2 * (1_318_912 + 262_668_288)),
    # the first of two stages: 40 layers and the embedding; the last has the head and its norm beside 40
    "70B, 16 bits, PP2": (
        "llama-3.1-70b",
        BF16,
        Placement(1, 2),
        2 * (40 * (855_638_016 + 16_384) + 1_050_673_152 + 8_192),
    ),
    # 16 GPUs and 8 KV heads: k and v of one head on each, 2*8192*128; all else in 16
    "70B, FP8, TP16": (
        "llama-3.1-70b",
        FP8,
        Placement(16),
        80 * ((134_217_728 + 704_643_072) // 16 + 2_097_152) + 2 * (1_318_912 + 131_334_144),
    ),
    # 4-bit values with 16-bit scales and zero points a group of 128: 0.51953125 bytes
    "8B, AWQ": ("llama-3.1-8b", "W4A16_AWQ", Placement(), 3_625_975_808 + 2 * 1_050_939_392),
    # attention_dp: all but the routed experts is on each GPU. Per layer 187,105,280 and, in 58, the shared
    # expert; 3 dense MLPs; 256/8 experts; at 1 + 4/16384 bytes. Others at 2: norms, routers, tables.
    "R1, FP8 blocks, 8 GPUs, attention apart": (
        "deepseek-r1",
        "FP8_BLOCK_SCALES",
        Placement(8, attention_dp=True),
        -(
            -(61 * 187_105_280 + 3 * 396_361_728 + 58 * 33 * 44_040_192)
            * (16384 + 4)
            // 16384
        )
        + 2 * (61 * 16_384 + 58 * 1_835_264 + 1_853_358_080 + 7_168),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "quantization", "place", "expected"), WEIGHTS.values(), ids=WEIGHTS)
def test_weights_of_a_gpu(name: str, quantization: str, place: Placement, expected: int) -> None:
    precision = Precision(ALGORITHMS.get(quantization), "bfloat16", "bfloat16")
    assert weights_bytes(shape(name), precision, place) == pytest.approx(expected, abs=1)


def test_shards_add_up() -> None:
    """Nothing is lost or held twice where heads divide: four quarters, and the norms on each."""
    model = shape("llama-3.1-8b")
    precision = Precision(None, "bfloat16", "bfloat16")
    norms = 2 * (32 * 8_192 + 4_096)
    whole = weights_bytes(model, precision, Placement())
    assert 4 * weights_bytes(model, precision, Placement(4)) == whole + 3 * norms


KV = {
    # layers * 2 * kv_heads * head_dim * bytes
    "8B": ("llama-3.1-8b", "bfloat16", Placement(), 32 * 2 * 8 * 128 * 2),  # 128 KiB
    "8B, fp8": ("llama-3.1-8b", "fp8", Placement(), 65_536),
    "70B": ("llama-3.1-70b", "bfloat16", Placement(), 327_680),  # 320 KiB
    "70B, TP2": ("llama-3.1-70b", "bfloat16", Placement(2), 163_840),
    "70B, TP8": ("llama-3.1-70b", "bfloat16", Placement(8), 40_960),
    "70B, TP16: a head twice": ("llama-3.1-70b", "bfloat16", Placement(16), 40_960),
    "70B, TP2, PP2": ("llama-3.1-70b", "bfloat16", Placement(2, 2), 81_920),
    "Qwen3-32B": ("qwen3-32b", "bfloat16", Placement(), 64 * 2 * 8 * 128 * 2),  # 256 KiB
    "Mixtral": ("mixtral-8x7b", "bfloat16", Placement(), 131_072),
    # latent: (512 + 64) values a layer, on every GPU whole
    "R1": ("deepseek-r1", "bfloat16", Placement(), 61 * 576 * 2),  # 70,272
    "R1, TP8": ("deepseek-r1", "bfloat16", Placement(8), 70_272),
    "R1, fp8": ("deepseek-r1", "fp8", Placement(8), 35_136),
    "8B, nvfp4: a scale every 16": ("llama-3.1-8b", "nvfp4", Placement(), 36_864),
}


@pytest.mark.parametrize(("name", "dtype", "place", "expected"), KV.values(), ids=KV)
def test_kv_of_a_token(name: str, dtype: str, place: Placement, expected: int) -> None:
    cost = kv_cost(shape(name), dtype, place, 32)
    assert cost.token_bytes == expected
    assert cost.block_bytes == 32 * expected


SEQUENCES = {
    # blocks of 32, 10 bytes a token where all is kept and 100 where the window of 64 is
    "one token takes a block": (1, 32 * 110),
    "two blocks": (64, 2 * 32 * 110),
    "the window and one block more": (96, 3 * 32 * 110),
    "beyond it only full layers grow": (3200, 100 * 32 * 10 + 3 * 32 * 100),
}


@pytest.mark.parametrize(("tokens", "expected"), SEQUENCES.values(), ids=SEQUENCES)
def test_kv_of_a_sequence_with_windows(tokens: int, expected: int) -> None:
    assert KvCost(10, 100, 64, 32).sequence_bytes(tokens) == expected
