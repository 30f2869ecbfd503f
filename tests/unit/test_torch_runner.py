"""TorchRunner against transformers' own `generate`: the same greedy tokens, however the work is cut up."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from serving.config import EngineConfig
from serving.engine.base import AttemptId, BlockId, Mode, SamplingParams, TokenLogprobs, Work
from serving.engine.sequence import PrefillSlice, Sequence, StepPlan
from serving.engine.torch.runner import TorchRunner
from serving.errors import StartError
from tests.unit.tiny_models import EOS, SHAPES, VOCAB, save_tiny_model

BLOCK = 16
NEW = 24
PROMPT_LENGTHS = (3, 130, 40, 16, 75)


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {shape: save_tiny_model(tmp_path_factory.mktemp(shape), shape) for shape in SHAPES}


def prompts() -> list[list[int]]:
    numbers = np.random.default_rng(3)
    return [numbers.integers(3, VOCAB, size=length).tolist() for length in PROMPT_LENGTHS]


@cache
def reference_model(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)  # in eval mode already


def expected(directory: Path, prompt: list[int], new: int = NEW) -> list[int]:
    """What transformers says; EOS does not stop it, so that every case has the same length."""
    model = reference_model(directory)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
    return [int(token) for token in out[0, len(prompt) :]]


def runner_for(directory: Path, *, fused: bool = True, kv_bytes: int = 1 << 20) -> TorchRunner:
    config = EngineConfig(dtype="float32", block_tokens=16, kv_bytes=kv_bytes)
    return TorchRunner(config, directory, fused=fused)


GREEDY = SamplingParams(max_tokens=NEW, seed=0, temperature=0.0)


class Loop:
    """The least that drives a runner: blocks in a shuffled order, one plan at a time."""

    def __init__(self, runner: TorchRunner) -> None:
        self.runner = runner
        order = np.random.default_rng(11).permutation(runner.memory.n_blocks)
        self.free = [BlockId(int(block)) for block in order]
        self.logprobs: dict[AttemptId, list[TokenLogprobs]] = {}
        self._attempts: Iterator[int] = iter(range(1 << 30))

    def add(
        self, prompt: list[int], params: SamplingParams = GREEDY, *, n_prompt: int | None = None
    ) -> Sequence:
        tokens = array("I", prompt)
        work = Work(AttemptId(next(self._attempts)), Mode.LOCAL, tokens, n_prompt or len(prompt), params, 0)
        return Sequence(work=work, tokens=array("I", prompt))

    def step(self, decodes: list[Sequence], prefills: list[PrefillSlice]) -> None:
        for sequence in decodes + [piece.sequence for piece in prefills]:
            while len(sequence.blocks) * BLOCK < len(sequence.tokens):
                sequence.blocks.append(self.free.pop())
        plan = StepPlan(decodes, prefills)
        drawn = self.runner.run(plan)
        drawing = plan.drawing
        assert len(drawn.tokens) == len(drawing)
        for piece in prefills:
            piece.sequence.computed += piece.count
        for sequence in decodes:
            sequence.computed += 1
        for row, (sequence, token) in enumerate(zip(drawing, drawn.tokens, strict=True)):
            sequence.tokens.append(token)
            if row in drawn.logprobs:
                self.logprobs.setdefault(sequence.work.attempt, []).append(drawn.logprobs[row])

    def drain(self, sequences: list[Sequence], *, chunk: int = 64, until: int = NEW) -> None:
        """Decode what can, and give at most `chunk` prompt tokens a step to the rest, in order."""
        while True:
            running = [s for s in sequences if s.n_generated < until]
            if not running:
                return
            decodes = [s for s in running if s.n_remaining == 1 and s.n_generated]
            prefills, budget = [], chunk
            for sequence in (s for s in running if s not in decodes):
                count = min(budget, sequence.n_remaining)
                if count:
                    prefills.append(PrefillSlice(sequence, sequence.computed, count))
                    budget -= count
            self.step(decodes, prefills)


def generated(sequence: Sequence) -> list[int]:
    return list(sequence.tokens[sequence.work.n_prompt :])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
def test_mixed_batch_with_chunked_prefill_equals_generate(
    model_dirs: dict[str, Path], shape: str, fused: bool
) -> None:
    directory = model_dirs[shape]
    loop = Loop(runner_for(directory, fused=fused))
    sequences = [loop.add(prompt) for prompt in prompts()]
    loop.drain(sequences, chunk=64)
    for sequence, prompt in zip(sequences, prompts(), strict=True):
        assert generated(sequence) == expected(directory, prompt)


@pytest.mark.parametrize("shape", SHAPES)
def test_cached_prefix_gives_the_same_tokens(model_dirs: dict[str, Path], shape: str) -> None:
    directory = model_dirs[shape]
    loop = Loop(runner_for(directory))
    prompt = prompts()[1]
    first = loop.add(prompt)
    loop.drain([first])
    for cached_blocks in (1, 5, len(prompt) // BLOCK):
        again = loop.add(prompt)
        again.blocks = first.blocks[:cached_blocks]
        again.computed = cached_blocks * BLOCK
        loop.drain([again])
        assert generated(again) == generated(first) == expected(directory, prompt)


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_copied_to_another_runner_continue_there(model_dirs: dict[str, Path], shape: str) -> None:
    directory = model_dirs[shape]
    prefill, decode = Loop(runner_for(directory)), Loop(runner_for(directory))
    sequences = []
    for prompt in prompts():
        source = prefill.add(prompt)
        prefill.drain([source], until=1)
        target = decode.add(prompt)
        for block in source.blocks:
            mine = decode.free.pop()
            decode.runner.pool.blocks[mine].copy_(prefill.runner.pool.blocks[block])
            target.blocks.append(mine)
        target.tokens.append(source.tokens[-1])
        target.computed = len(prompt)
        assert decode.runner.accept(target, len(target.tokens)) is None
        sequences.append(target)
    decode.drain(sequences)
    for sequence, prompt in zip(sequences, prompts(), strict=True):
        assert generated(sequence) == expected(directory, prompt)


def test_the_last_block_of_the_pool_is_usable(model_dirs: dict[str, Path]) -> None:
    """Padding reads a block of its own, so every id up to n_blocks belongs to the caller."""
    directory = model_dirs["llama"]
    loop = Loop(runner_for(directory))
    loop.free = [BlockId(loop.runner.memory.n_blocks - 1 - i) for i in range(40, -1, -1)]
    sequences = [loop.add(prompt) for prompt in prompts()]
    loop.drain(sequences)
    assert [generated(s) for s in sequences] == [expected(directory, prompt) for prompt in prompts()]
    assert not loop.runner.pool.blocks[loop.runner.memory.n_blocks].any()


def test_logprobs_are_those_of_the_unmodified_distribution(model_dirs: dict[str, Path]) -> None:
    directory = model_dirs["llama"]
    loop = Loop(runner_for(directory))
    params = SamplingParams(
        max_tokens=8,
        seed=5,
        temperature=0.7,
        top_k=20,
        logit_bias={9: 3.0},
        logprobs=4,
        presence_penalty=0.5,
    )
    sequence = loop.add(prompts()[2], params)
    other = loop.add(prompts()[0], SamplingParams(max_tokens=8, seed=1, logprobs=0))
    loop.drain([other, sequence, loop.add(prompts()[3])], until=8)
    model = reference_model(directory)
    for seq, top in ((sequence, 4), (other, 0)):
        with torch.inference_mode():
            logits = model(torch.tensor([list(seq.tokens)])).logits[0]
        reference = torch.log_softmax(logits, -1)
        entries = loop.logprobs[seq.work.attempt]
        assert [entry.token for entry in entries] == generated(seq)
        for entry, row in zip(entries, reference[seq.work.n_prompt - 1 :], strict=False):
            assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-4)
            best = row.topk(max(top, 1))
            assert [token for token, _ in entry.top] == best.indices[:top].tolist()
            assert [value for _, value in entry.top] == pytest.approx(best.values[:top].tolist(), abs=1e-4)


SAMPLED = SamplingParams(max_tokens=NEW, seed=1234, temperature=1.0, top_p=0.95)


def test_a_seed_repeats_its_stream_and_others_differ(model_dirs: dict[str, Path]) -> None:
    loop = Loop(runner_for(model_dirs["llama"]))
    prompt = prompts()[2]
    same = [loop.add(prompt, SAMPLED) for _ in range(2)]
    loop.drain([same[0]])
    loop.drain([same[1]])
    other = loop.add(prompt, SamplingParams(max_tokens=NEW, seed=1235, temperature=1.0, top_p=0.95))
    loop.drain([other])
    assert generated(same[0]) == generated(same[1])
    assert generated(same[0]) != generated(other)


def test_a_seeded_request_draws_the_same_among_others(model_dirs: dict[str, Path]) -> None:
    loop = Loop(runner_for(model_dirs["llama"]))
    alone = loop.add(prompts()[2], SAMPLED)
    loop.drain([alone])
    seeded = loop.add(prompts()[2], SAMPLED)
    others = [
        loop.add(prompt, SamplingParams(max_tokens=NEW, seed=i, temperature=0.8, top_k=9))
        for i, prompt in enumerate(prompts())
    ]
    loop.drain([*others[:2], seeded, *others[2:], loop.add(prompts()[4])])
    assert generated(seeded) == generated(alone)


@pytest.mark.parametrize("at", [1, 7, NEW - 1])
def test_a_resumed_stream_goes_on_as_if_uninterrupted(model_dirs: dict[str, Path], at: int) -> None:
    """A second attempt gets the prompt and what was sent, and draws by position from there."""
    directory = model_dirs["llama"]
    params = SamplingParams(
        max_tokens=NEW,
        seed=77,
        temperature=1.0,
        frequency_penalty=0.4,
        repetition_penalty=1.1,
        min_tokens=NEW,
    )
    whole = Loop(runner_for(directory))
    first = whole.add(prompts()[4], params)
    whole.drain([first])
    sent = list(first.tokens[: first.work.n_prompt + at])
    resumed_on = Loop(runner_for(directory))
    second = resumed_on.add(sent, params, n_prompt=first.work.n_prompt)
    while second.n_remaining > 1:
        resumed_on.step([], [PrefillSlice(second, second.computed, min(30, second.n_remaining))])
    resumed_on.drain([second])
    assert generated(second) == generated(first)
    assert EOS not in generated(first)


def test_layout_names_model_dtype_and_block(model_dirs: dict[str, Path]) -> None:
    one = runner_for(model_dirs["llama"])
    assert one.layout == runner_for(model_dirs["llama"], kv_bytes=1 << 21).layout
    assert one.layout != runner_for(model_dirs["mistral"]).layout
    larger = TorchRunner(
        EngineConfig(dtype="float32", block_tokens=32, kv_bytes=1 << 20), model_dirs["llama"]
    )
    half = TorchRunner(
        EngineConfig(dtype="bfloat16", block_tokens=16, kv_bytes=1 << 20), model_dirs["llama"]
    )
    assert len({one.layout, larger.layout, half.layout}) == 3
    assert half.memory.block_bytes * 2 == one.memory.block_bytes
    assert one.memory.n_blocks == (1 << 20) // one.memory.block_bytes
    assert one.memory.address == one.pool.blocks.data_ptr()


@pytest.mark.parametrize(
    ("shape", "overrides", "says"),
    [
        ("mistral", {"sliding_window": 64}, "sliding-window attention (64 of 512 tokens)"),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
            "sliding-window",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "'dynamic'",
        ),
    ],
    ids=["mistral-window", "qwen3-window", "dynamic-rope"],
)
def test_what_would_be_served_wrongly_is_refused(
    tmp_path: Path, shape: str, overrides: dict[str, object], says: str
) -> None:
    save_tiny_model(tmp_path, shape, **overrides)
    with pytest.raises(StartError, match="not supported") as caught:
        runner_for(tmp_path)
    assert says in caught.value.message


@pytest.mark.parametrize(
    ("shape", "overrides"),
    [
        ("mistral", {"sliding_window": 512}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 64}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
    ],
    ids=["mistral-window-is-context", "qwen2-window-off", "linear-rope", "biases"],
)
def test_variants_of_the_shapes_equal_generate(
    tmp_path: Path, shape: str, overrides: dict[str, object]
) -> None:
    save_tiny_model(tmp_path, shape, **overrides)
    loop = Loop(runner_for(tmp_path))
    sequence = loop.add(prompts()[4])
    loop.drain([sequence], chunk=32)
    assert generated(sequence) == expected(tmp_path, prompts()[4])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", SHAPES)
def test_cuda_equals_generate(model_dirs: dict[str, Path], shape: str) -> None:
    """The same code on a GPU: mixed batch, chunks, a prefix, sampling; memory is VRAM."""
    config = EngineConfig(dtype="float32", block_tokens=16, kv_bytes=1 << 20, device="cuda")
    loop = Loop(TorchRunner(config, model_dirs[shape]))
    assert loop.runner.memory.kind == "VRAM"
    sequences = [loop.add(prompt) for prompt in prompts()]
    loop.drain(sequences, chunk=64)
    again = loop.add(prompts()[1])
    again.blocks, again.computed = sequences[1].blocks[:3], 3 * BLOCK
    loop.drain([again])
    for sequence, prompt in zip([*sequences, again], [*prompts(), prompts()[1]], strict=True):
        assert generated(sequence) == expected(model_dirs[shape], prompt)
    on_cpu = Loop(runner_for(model_dirs[shape]))
    params = SamplingParams(
        max_tokens=NEW, seed=3, temperature=0.9, top_p=0.9, top_k=50, min_p=0.01, frequency_penalty=0.3,
        repetition_penalty=1.2, logit_bias={8: 1.0}, min_tokens=4, logprobs=2,
    )  # fmt: skip
    streams = []
    for each in (loop, on_cpu):
        sampled = each.add(prompts()[2], params)
        each.drain([sampled, each.add(prompts()[3])])
        streams.append(generated(sampled))
    assert streams[0] == streams[1]


def test_too_little_memory_is_refused(model_dirs: dict[str, Path]) -> None:
    with pytest.raises(StartError, match=r"engine\.kv_bytes = 65536: room for \d blocks"):
        TorchRunner(EngineConfig(dtype="float32", block_tokens=128, kv_bytes=1 << 16), model_dirs["llama"])
