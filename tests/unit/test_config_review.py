"""`check`: every rule finds its mistake, says a remedy, and keeps silent about what is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from serving.check_command import WRONG, run
from serving.config import load_config
from serving.config_review import Finding, Level, review
from serving.pool_capacity import Options
from serving.preflight import Plan
from tests.unit.test_footprint import SHAPES
from tests.unit.tiny_models import save_tiny_model

LLAMA_8B = Options(gpu="H100-80", shapes={"": SHAPES / "llama-3.1-8b.json"})
E, W, N = Level.ERROR, Level.WARNING, Level.NOTE


def trtllm(*, model: str = "m", slo: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    """A variant with nothing to find, but for `settings`; `engine` and `trtllm` are merged."""
    ours = {"max_seq_len": 8192, "free_gpu_memory_fraction": 0.85, **settings.pop("trtllm", {})}
    engine = {"kind": "tensorrt_llm", "max_batch": 76, **settings.pop("engine", {}), "trtllm": ours}
    layout = settings.get("parallel", {})
    gpus = layout.get("tensor", 1) * layout.get("pipeline", 1)
    pools = {"prefill": {"gpus": gpus}, "decode": {"gpus": gpus}}
    variant = {"weights": "/no/such/model", "engine": engine, **pools, **settings}
    return {"models": [{"name": model, "variants": [variant], "slo": slo or {}}]}


def torch(**settings: Any) -> dict[str, Any]:
    engine = {"kind": "torch", "kv_bytes": 2 << 30, **settings.pop("engine", {})}
    return {
        "models": [{"name": "m", "variants": [{"weights": "/no/such/model", "engine": engine, **settings}]}]
    }


def sim(**engine: Any) -> dict[str, Any]:
    profile = {"context_tokens": 1024, "kv_bytes_per_token": 64}
    engine = {"kind": "sim", "profile": profile, "kv_bytes": 1 << 22, **engine}
    return {"models": [{"name": "m", "variants": [{"weights": "w", "engine": engine}]}]}


def found(args: dict[str, Any], options: Options = LLAMA_8B) -> list[Finding]:
    return review(Plan(Path("serve.yaml"), {}, (load_config(args),)), options)


def shape(name: str, gpu: str = "H100-80") -> Options:
    return Options(gpu=gpu, shapes={"": SHAPES / f"{name}.json"})


RIGHT = {
    "tensorrt_llm": (trtllm(), LLAMA_8B),
    "sim": (sim(), Options()),
    "as tight as it may be": (trtllm(trtllm={"free_gpu_memory_fraction": 0.86}), LLAMA_8B),
    "no GPU known, no weights here": (trtllm(), Options()),
    "70B on two": (
        trtllm(
            parallel={"tensor": 2},
            trtllm={"free_gpu_memory_fraction": 0.77, "kv_dtype": "fp8"},
            requires={"quantization": "FP8"},
        ),
        shape("llama-3.1-70b"),
    ),
    "fp8 KV for short prompts of a long model": (
        trtllm(trtllm={"kv_dtype": "fp8"}, prompt_tokens={"max": 7000}, engine={"max_batch": 150}),
        LLAMA_8B,
    ),
}


@pytest.mark.parametrize(("args", "options"), RIGHT.values(), ids=RIGHT)
def test_nothing_to_find(args: dict[str, Any], options: Options) -> None:
    assert [finding for finding in found(args, options) if finding.level is not N] == []


# (settings, options, level, setting, problem, remedy)
MISTAKES: dict[str, tuple[dict[str, Any], Options, Level, str, str, str]] = {
    # ---------------- lengths
    "steps shorter than prompts": (
        trtllm(trtllm={"chunked_prefill": False, "max_num_tokens": 4096}),
        LLAMA_8B,
        E,
        "engine.trtllm.max_num_tokens",
        "4,096 tokens a step without chunked_prefill: prompts up to 8,192 are refused",
        "chunked_prefill: true, or max_num_tokens: 8192, or prompt_tokens.max: 4096",
    ),
    "steps smaller than the batch": (
        trtllm(trtllm={"max_num_tokens": 64}),
        LLAMA_8B,
        E,
        "engine.trtllm.max_num_tokens",
        "64 tokens a step; a batch of 76 needs one for each sequence",
        "at least max_batch (76)",
    ),
    "steps smaller than the batch, own engine": (
        sim(chunk_tokens=32),
        Options(),
        E,
        "engine.chunk_tokens",
        "32 tokens a step; a batch of 64",
        "at least max_batch (64)",
    ),
    "transfer buffer too small": (
        trtllm(trtllm={"max_tokens_in_buffer": 4096}),
        LLAMA_8B,
        E,
        "engine.trtllm.max_tokens_in_buffer",
        "4,096 tokens; the KV of a prompt may have 8,192",
        "8192, or max_seq_len: 4096",
    ),
    "transfer buffer odd": (
        trtllm(trtllm={"max_tokens_in_buffer": 8200}),
        LLAMA_8B,
        E,
        "engine.trtllm.max_tokens_in_buffer",
        "buffers of 8200 tokens are no multiple of block_tokens (32)",
        "8224",
    ),
    "context odd": (
        trtllm(trtllm={"max_seq_len": 8000}, engine={"block_tokens": 128}),
        LLAMA_8B,
        E,
        "engine.trtllm.max_seq_len",
        "buffers of 8000 tokens are no multiple of block_tokens (128)",
        "7936",
    ),
    "transfer buffer wasteful": (
        trtllm(trtllm={"max_tokens_in_buffer": 32768}),
        LLAMA_8B,
        W,
        "engine.trtllm.max_tokens_in_buffer",
        "32,768 tokens of buffers for prompts up to 8,192",
        "8192 is enough",
    ),
    "beyond the model's context": (
        trtllm(trtllm={"max_seq_len": 262144}),
        LLAMA_8B,
        E,
        "engine.trtllm.max_seq_len",
        "262,144 tokens; the model was made for 131,072",
        "at most 131072",
    ),
    "no room for an answer": (
        trtllm(prompt_tokens={"max": 8192}),
        LLAMA_8B,
        E,
        "prompt_tokens.max",
        "8,192 tokens leave no room for an answer in the context of 8,192",
        "below 8192",
    ),
    "prompts that never fit": (
        trtllm(prompt_tokens={"min": 9000}),
        LLAMA_8B,
        E,
        "prompt_tokens.min",
        "prompts of 9,000 tokens and more do not fit the context of 8,192",
        "a smaller min",
    ),
    # ---------------- layout
    "heads": (
        trtllm(parallel={"tensor": 3}),
        LLAMA_8B,
        E,
        "prefill parallel.tensor",
        "3 does not divide 32 heads",
        "one of 1, 2, 4, 8",
    ),
    "KV heads held twice": (
        trtllm(parallel={"tensor": 16}),
        LLAMA_8B,
        W,
        "prefill parallel.tensor",
        "16 GPUs, 8 KV heads: each is held 2 times",
        "tensor: 8",
    ),
    "more than a host": (
        trtllm(parallel={"tensor": 16}),
        LLAMA_8B,
        W,
        "prefill parallel.tensor",
        "16 GPUs are more than a host has",
        "tensor: 8 or less",
    ),
    "stages": (
        trtllm(parallel={"pipeline": 3}),
        LLAMA_8B,
        W,
        "prefill parallel.pipeline",
        "3 does not divide 32 layers",
        "a number that does",
    ),
    "latent attention on several GPUs": (
        trtllm(parallel={"tensor": 8}, trtllm={"max_seq_len": 16384}),
        shape("deepseek-r1", "H200"),
        W,
        "prefill parallel.tensor",
        "each of 8 GPUs holds the whole KV",
        "enable_attention_dp: true",
    ),
    "one device": (
        torch(parallel={"tensor": 2}),
        LLAMA_8B,
        E,
        "prefill parallel",
        "engine kind torch computes on one device; tensor x pipeline = 2",
        "set both to 1",
    ),
    "a GPU that Ray hides": (
        torch(engine={"device": "cuda"}),
        LLAMA_8B,
        E,
        "prefill.gpus",
        "0, and a worker computes on one GPU",
        "prefill.gpus: 1",
    ),
    "a GPU for nothing": (
        torch(decode={"gpus": 1}),
        LLAMA_8B,
        W,
        "decode.gpus",
        "1 reserved, and the engine computes on CPUs",
        "decode.gpus: 0",
    ),
    "threads without CPUs": (
        torch(engine={"threads": 4}),
        LLAMA_8B,
        W,
        "engine.threads",
        "4 threads on 1 CPUs of prefill",
        "prefill.cpus: 4",
    ),
    # ---------------- precision
    "FP8 on Ampere": (
        trtllm(requires={"quantization": "FP8"}),
        shape("llama-3.1-8b", "A100-80"),
        E,
        "weights",
        "FP8 does not run on A100-80 (Ampere); it does on Ada, Blackwell, Blackwell RTX, Hopper",
        "W4A16_AWQ",
    ),
    "FP4 on Hopper": (
        trtllm(requires={"quantization": "NVFP4"}),
        LLAMA_8B,
        E,
        "weights",
        "NVFP4 does not run on H100-80 (Hopper)",
        "FP8 or 16-bit weights",
    ),
    "FP4 KV on Hopper": (
        trtllm(trtllm={"kv_dtype": "nvfp4"}),
        LLAMA_8B,
        E,
        "engine.trtllm.kv_dtype",
        "nvfp4 KV does not run on H100-80; it does on Blackwell",
        "fp8, or auto",
    ),
    "not in the matrix": (
        trtllm(requires={"quantization": "W8A16"}),
        LLAMA_8B,
        W,
        "weights",
        "W8A16 is not in TensorRT-LLM's support matrix for Hopper",
        "try it before",
    ),
    "the checkpoint is another": (
        trtllm(requires={"quantization": "NO_QUANT"}, parallel={"tensor": 8}),
        shape("deepseek-r1", "H200"),
        E,
        "requires.quantization",
        "none, and the checkpoint is FP8_BLOCK_SCALES: no worker would start",
        "FP8_BLOCK_SCALES, or other weights",
    ),
    "no such quantisation": (
        trtllm(requires={"quantization": "FP9"}),
        LLAMA_8B,
        E,
        "requires.quantization",
        "requires.quantization = 'FP9'; allowed: NO_QUANT, FP8",
        "a name of that list",
    ),
    "quantised KV for long prompts": (
        trtllm(trtllm={"kv_dtype": "fp8", "max_seq_len": 32768, "free_gpu_memory_fraction": 0.8}),
        LLAMA_8B,
        W,
        "engine.trtllm.kv_dtype",
        "fp8 KV with prompts up to 32,768 tokens; it loses quality beyond about 8k",
        "prompt_tokens.max: 8192",
    ),
    # ---------------- memory
    "does not fit": (
        trtllm(),
        shape("llama-3.1-70b"),
        E,
        "prefill parallel",
        "does not fit H100-80: of 80 GiB, 131 are weights",
        "more GPUs a worker (parallel.tensor)",
    ),
    "too tight": (
        trtllm(trtllm={"free_gpu_memory_fraction": 0.97}),
        LLAMA_8B,
        W,
        "engine.trtllm.free_gpu_memory_fraction",
        "100% of the memory of H100-80 in use on prefill workers",
        "free_gpu_memory_fraction: 0.83, about 90%",
    ),
    "a little too tight": (
        trtllm(trtllm={"free_gpu_memory_fraction": 0.87}),  # 0.86 is 91.7 % and right
        LLAMA_8B,
        W,
        "engine.trtllm.free_gpu_memory_fraction",
        "92% of the memory of H100-80 in use on prefill workers",
        "free_gpu_memory_fraction: 0.83, about 90%",
    ),
    "half the card idle": (
        trtllm(trtllm={"free_gpu_memory_fraction": 0.2}, engine={"max_batch": 16}),
        LLAMA_8B,
        W,
        "engine.trtllm.free_gpu_memory_fraction",
        "of the memory of H100-80 in use on prefill workers",
        "more KV cache, fewer GPUs a worker, or a smaller GPU",
    ),
    "not one sequence": (
        trtllm(trtllm={"max_seq_len": None, "transceiver_runtime": "PYTHON"}),
        shape("llama-3.1-8b", "L4"),
        E,
        "engine.trtllm",
        "tokens; one sequence of the context has 131,072",
        "more GPUs a worker",
    ),
    "not one sequence, own engine": (
        sim(kv_bytes=1 << 16, profile={"context_tokens": 4096, "kv_bytes_per_token": 64}),
        Options(),
        E,
        "engine.kv_bytes",
        "KV for 1,024 tokens; one sequence of the context has 4,096",
        "kv_bytes: 262144",
    ),
    "KV that no batch fills": (
        sim(max_batch=8),
        Options(),
        W,
        "engine.kv_bytes",
        "a full batch of 8 uses at most 12% of the KV",
        "a larger max_batch, or less KV",
    ),
    "a batch that is never full": (
        trtllm(engine={"max_batch": 512}),
        LLAMA_8B,
        W,
        "engine.max_batch",
        "512, and the KV holds 77 sequences of 4,608 tokens with 20 % head-room",
        "max_batch: 77",
    ),
    "slower than its target alone": (
        trtllm(slo={"itl_ms": 2}),
        LLAMA_8B,
        W,
        "slo.itl_ms",
        "2, and reading the weights takes 4.9 ms on 1 GPUs",
        "more GPUs a worker, fewer bits a weight",
    ),
    "slower than its target with a full batch": (
        trtllm(slo={"itl_ms": 8}),
        LLAMA_8B,
        W,
        "slo.itl_ms",
        "8, and a step of 76 sequences takes 11.6 ms or more",
        "a smaller max_batch",
    ),
    # ---------------- the rest
    "a GPU of no catalogue": (
        trtllm(requires={"gpu": "X900"}),
        Options(shapes=LLAMA_8B.shapes),
        W,
        "requires.gpu",
        "requires.gpu = 'X900': no such GPU; known: A10",
        "memory and quantisation are not looked at",
    ),
    "no GPU named": (
        trtllm(),
        Options(shapes=LLAMA_8B.shapes),
        N,
        "requires.gpu",
        "runs on GPUs: set requires.gpu, or give --gpu NAME",
        "not looked at",
    ),
    "no weights here": (
        trtllm(),
        Options(gpu="H200"),
        N,
        "weights",
        "/no/such/model is not on this machine",
        "--shape FILE",
    ),
    "a shape that is none": (
        trtllm(),
        Options(gpu="H200", shapes={"": Path("/no/such/config.json")}),
        E,
        "weights",
        "/no/such/config.json: cannot be read",
        "a checkpoint that is whole",
    ),
    "a deadline that never passes": (
        {**trtllm(), "deadlines": {"request_ms": 1000, "queue_ms": 2000}},
        LLAMA_8B,
        W,
        "deadlines.queue_ms",
        "2000 is beyond request_ms (1000)",
        "at most 1000",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(name: str) -> None:
    args, options, level, setting, problem, remedy = MISTAKES[name]
    all_of_them = found(args, options)
    matching = [
        f
        for f in all_of_them
        if f.level is level and f.where.endswith(setting) and problem in f.problem and remedy in f.remedy
    ]
    assert len(matching) == 1, "\n".join(map(str, all_of_them))
    assert "\n" not in matching[0].problem + matching[0].remedy


def test_the_worst_comes_first() -> None:
    levels = [
        f.level for f in found(trtllm(parallel={"tensor": 3}, trtllm={"max_tokens_in_buffer": 32768}))
    ]
    assert levels == sorted(levels, key=list(Level).index)
    assert {E, W} <= set(levels)


def test_a_remedy_is_one() -> None:
    """What `check` says about a tight card does what it promises."""
    tight = trtllm(trtllm={"free_gpu_memory_fraction": 0.97})
    (finding,) = found(tight)
    fraction = float(finding.remedy.split(": ")[1].split(",")[0])
    assert found(trtllm(trtllm={"free_gpu_memory_fraction": fraction})) == []


def test_a_checkpoint_that_contradicts_is_an_error(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 640}))
    (finding, *_) = found(torch(weights=str(tmp_path)), Options())
    assert finding.level is E
    assert "embed_tokens.weight is 320 x 48; config.json says 640 x 48" in finding.problem


def test_weights_that_are_not_those_required(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    pinned = torch(weights=str(tmp_path), requires={"weights_digest": "a" * 32})
    problems = [f.problem for f in found(pinned, Options()) if f.where.endswith("weights_digest")]
    assert len(problems) == 1
    assert "the weights here are" in problems[0]


# ---------------------------------------------------------------- the command


def yaml_file(path: Path, args: dict[str, Any]) -> str:
    application = {"name": "a", "import_path": "serving.app:build", "args": args}
    path.write_text(json.dumps({"applications": [application]}))  # JSON is YAML
    return str(path)


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Errors 2; warnings and notes 0."""
    right = yaml_file(tmp_path / "right.yaml", trtllm())
    warned = yaml_file(tmp_path / "warned.yaml", trtllm(trtllm={"free_gpu_memory_fraction": 0.97}))
    wrong = yaml_file(tmp_path / "wrong.yaml", trtllm(parallel={"tensor": 3}))
    assert run([right], LLAMA_8B, as_json=False) == 0
    assert capsys.readouterr().out == f"{right}: ok; models: m; 2 CPUs, 2 GPUs\n"
    assert run([right, warned], LLAMA_8B, as_json=False) == 0
    assert f"{warned}: 1 warning; models: m" in capsys.readouterr().out
    assert run([wrong, right], LLAMA_8B, as_json=False) == WRONG
    said = capsys.readouterr().out
    assert f"{wrong}: 1 error" in said
    assert f"{right}: ok" in said
    assert run([str(tmp_path / "none.yaml")], LLAMA_8B, as_json=False) == WRONG
    assert "none.yaml: no such file" in capsys.readouterr().err


@pytest.mark.parametrize("name", MISTAKES)
def test_the_screen_has_80_columns(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args, options, *_ = MISTAKES[name]
    monkeypatch.chdir(tmp_path)
    yaml_file(Path("s.yaml"), args)
    run(["s.yaml"], options, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("->" in line for line in lines) == len(found(args, options))


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = yaml_file(tmp_path / "wrong.yaml", trtllm(parallel={"tensor": 3}))
    assert run([wrong, "nothing"], LLAMA_8B, as_json=True) == WRONG
    first, second = json.loads(capsys.readouterr().out)["configs"]
    assert (first["config"], first["verdict"], first["gpus"]) == (wrong, "1 error, 1 warning", 6)
    assert first["findings"][0]["level"] == "error"
    assert first["findings"][0]["remedy"] == "one of 1, 2, 4, 8"
    assert "no such file" in second["findings"][0]["problem"]
