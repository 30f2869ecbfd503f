"""The adapter against both versions of the contract: what is asked of the engine, and that it can be.

The fake refuses what the contract does not have, so whatever passes here uses no name that a version lacks.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serving.config import EngineConfig, Parallel, TrtllmConfig, load_config
from serving.engine.base import Guided, Mode, TokenLogprobs
from serving.engine.trtllm.api import Api, load_api
from serving.engine.trtllm.arguments import RESERVED, RESERVED_IN_SECTIONS, llm_arguments
from serving.engine.trtllm.asking import MIN_GLOBAL_ID, global_id
from serving.engine.trtllm.build import build_trtllm_engine
from serving.engine.trtllm.checkpoint import check_shape, read_checkpoint
from serving.engine.trtllm.events import salt_of
from serving.engine.trtllm.placement import check_node, ray_placement, reserved
from serving.engine.trtllm.sampling import engine_params, token_logprobs
from serving.engine.trtllm.state import StateError, pack_state, unpack_state
from serving.errors import ConfigError, StartError
from serving.guided import choice
from tests.fake_trtllm.contract import PROFILES, Contract, document
from tests.fake_trtllm.package import installed
from tests.unit.trtllm_rig import BLOCK, EOS, NAMESPACE, engine_config, prompt, running, save_model, work

versions = pytest.mark.parametrize("version", PROFILES)


@pytest.fixture
def api(version: str) -> Api:
    with installed(version):
        return load_api()


# ---------------------------------------------------------------- the fake is the contract


@versions
def test_the_fake_has_the_contracts_signatures(version: str) -> None:
    contract = Contract(version)
    with installed(version) as package:
        for verb in ("__init__", "generate_async", "get_stats_async", "get_kv_cache_events_async"):
            assert inspect.signature(getattr(package.LLM, verb)) == contract.signature("LLM", verb)
        assert hasattr(package.LLM, "get_kv_cache_capacity") == (version == "main")
        parameters = inspect.signature(package.LLM.generate_async).parameters
        assert ("priority" in parameters) == (version == "main")


@versions
def test_the_fake_implements_nothing_the_contract_does_not_hold(version: str) -> None:
    contract = Contract(version)
    with installed(version) as package:
        output = package.llmapi.RequestOutput(1, [1], None)
        told = {field["name"] for field in contract.fields("RequestOutput")}
        told |= {entry["name"] for entry in contract.entry("RequestOutput")["methods"]}
        assert {name for name in dir(output) if not name.startswith("_")} <= told
        told = {entry["name"] for entry in contract.entry("LLM")["methods"]} | {"machine"}
        assert {name for name in dir(package.LLM) if not name.startswith("_")} <= told
        completion = package.llmapi.CompletionOutput(0)
        told = {field["name"] for field in contract.fields("CompletionOutput")}
        told |= {entry["name"] for entry in contract.entry("CompletionOutput")["methods"]}
        assert {name for name in dir(completion) if not name.startswith("_")} <= told


@versions
def test_the_fake_refuses_as_the_real_one_does(version: str, tmp_path: Path) -> None:
    save_model(tmp_path)
    with installed(version) as package:
        with pytest.raises(ValueError, match="invalid argument: quant_config"):
            package.LLM(str(tmp_path), quant_config={})
        with pytest.raises(ValueError, match="tokens_per_blck"):
            package.LLM(str(tmp_path), kv_cache_config={"tokens_per_blck": 3})
        with pytest.raises(TypeError):
            package.SamplingParams(max_token=3)
        with pytest.raises(TypeError):
            package.SamplingParams(3)  # by keyword only
        assert package.SamplingParams().max_tokens == 32


# ---------------------------------------------------------------- LLM(...)


@versions
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_arguments_are_accepted_and_pinned(api: Api, version: str, role: str, tmp_path: Path) -> None:
    checkpoint = read_checkpoint(save_model(tmp_path))
    config = engine_config(
        kv_dtype="fp8",
        host_cache_bytes=1 << 20,
        cuda_graph=False,
        guided_backend="xgrammar",
        lora={"a": "/adapters/a"},
        env={"UCX_TLS": "rc,cuda"},
        extra={"enable_attention_dp": True, "kv_cache_config": {"max_tokens": 4096}},
    )
    arguments = llm_arguments(api, config, Parallel(2, 2), role, checkpoint)
    made = Contract(version).make("TorchLlmArgs")(**arguments)
    assert made.cache_transceiver_config.backend == "NIXL"
    assert made.cache_transceiver_config.max_tokens_in_buffer == 1024
    assert made.cache_transceiver_config.kv_transfer_timeout_ms == 3102  # 3 s, and 0.1 a 1000 tokens
    assert getattr(made.cache_transceiver_config, "transceiver_runtime", "CPP") == "CPP"
    assert made.kv_cache_config.event_buffer_max_size == 100_000
    assert made.kv_cache_config.tokens_per_block == BLOCK
    assert made.kv_cache_config.max_tokens == 4096
    assert made.enable_iter_perf_stats
    assert made.disable_overlap_scheduler == (role == "prefill")
    assert not made.skip_tokenizer_init  # the grammar needs it
    assert (made.tensor_parallel_size, made.pipeline_parallel_size) == (2, 2)


@versions
def test_arguments_leave_what_nobody_set_to_the_engine(api: Api, version: str, tmp_path: Path) -> None:
    checkpoint = read_checkpoint(save_model(tmp_path))
    arguments = llm_arguments(api, engine_config(), Parallel(), "decode", checkpoint)
    assert "dtype" not in arguments["kv_cache_config"]
    assert "orchestrator_type" not in arguments
    assert "cuda_graph_config" not in arguments
    assert arguments["skip_tokenizer_init"]


REFUSED: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "unknown": ({"extra": {"enable_atention_dp": True}}, "main", ["did you mean enable_attention_dp?"]),
    "only in the other version": (
        {"extra": {"disable_flashinfer_sampling": True}},
        "main",
        ["engine.trtllm.extra.disable_flashinfer_sampling", "has no such field"],
    ),
    "not in this version yet": (
        {"extra": {"enable_early_first_token_response": True}},
        "1.2.1",
        ["extra.enable_early_first_token_response", "has no such field"],
    ),
    "within a section": (
        {"extra": {"kv_cache_config": {"disk_cache_size": 1}}},
        "1.2.1",
        ["extra.kv_cache_config.disk_cache_size", "has no such field"],
    ),
    "ours": ({"extra": {"max_batch_size": 4}}, "main", ["extra.max_batch_size", "set by KVRelay"]),
    "ours in a section": (
        {"extra": {"cache_transceiver_config": {"backend": "UCX"}}},
        "main",
        ["extra.cache_transceiver_config.backend", "set by KVRelay"],
    ),
    "no mapping": ({"extra": {"kv_cache_config": 3}}, "main", ["kv_cache_config = 3", "a mapping"]),
    "runtime": ({"transceiver_runtime": "PYTHON"}, "1.2.1", ["transceiver_runtime = 'PYTHON'", "CPP"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_installed_version_lacks_is_one_clear_line(name: str, tmp_path: Path) -> None:
    section, version, parts = REFUSED[name]
    save_model(tmp_path)
    with installed(version), pytest.raises(ConfigError) as caught:
        build_trtllm_engine(engine_config(**section), tmp_path, Parallel(), "decode")
    assert "\n" not in caught.value.message
    for part in parts:
        assert part in caught.value.message


def test_every_argument_that_is_ours_is_reserved(tmp_path: Path) -> None:
    with installed("main"):
        api = load_api()
    full = engine_config(lora={"a": "/a"}, env={"A": "b"}, guided_backend="xgrammar", orchestrator="ray")
    arguments = llm_arguments(
        api, full, Parallel(), "decode", read_checkpoint(save_model(tmp_path)), placement={}
    )
    assert set(arguments) <= RESERVED | set(RESERVED_IN_SECTIONS)
    for section, fields in RESERVED_IN_SECTIONS.items():
        assert set(arguments[section]) <= fields
        assert fields <= api.section_fields[section]


SHAPES: dict[str, tuple[Parallel, dict[str, Any], list[str]]] = {
    "heads": (Parallel(3), {}, ["parallel.tensor = 3", "4 attention heads"]),
    "layers": (Parallel(1, 3), {}, ["parallel.pipeline = 3", "2 layers"]),
    "context": (Parallel(), {"max_seq_len": 4096}, ["max_seq_len = 4096", "made for 1024"]),
    "buffer": (Parallel(), {"max_tokens_in_buffer": 512}, ["max_tokens_in_buffer = 512", "1024 tokens"]),
    "step": (Parallel(), {"max_num_tokens": 4}, ["max_num_tokens = 4", "block_tokens (8)"]),
    "nvfp4": (Parallel(), {"kv_dtype": "nvfp4"}, ["kv_dtype = 'nvfp4'", "ModelOpt"]),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_checkpoint_that_contradicts_the_settings(name: str, tmp_path: Path) -> None:
    parallel, section, parts = SHAPES[name]
    checkpoint = read_checkpoint(save_model(tmp_path))
    with pytest.raises(ConfigError) as caught:
        check_shape(checkpoint, parallel, TrtllmConfig(**section), BLOCK)
    for part in parts:
        assert part in caught.value.message


def test_a_quantised_checkpoint_tells_its_kv(tmp_path: Path) -> None:
    save_model(tmp_path)
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    checkpoint = read_checkpoint(tmp_path)
    assert (checkpoint.quant_algo, checkpoint.kv_quant_algo) == ("FP8", "FP8")
    check_shape(checkpoint, Parallel(), TrtllmConfig(), BLOCK)
    check_shape(checkpoint, Parallel(), TrtllmConfig(kv_dtype="fp8"), BLOCK)
    with pytest.raises(ConfigError, match="allowed: auto, fp8"):
        check_shape(checkpoint, Parallel(), TrtllmConfig(kv_dtype="bfloat16"), BLOCK)
    halved = checkpoint.kv_block_bytes(BLOCK, "auto")
    assert halved * 2 == read_checkpoint(tmp_path).kv_block_bytes(BLOCK, "bfloat16")


# ---------------------------------------------------------------- the start


def test_without_the_package_one_line_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"'tensorrt_llm', which is not installed.*kvrelay\[tensorrt\]"):
        build_trtllm_engine(engine_config(), save_model(tmp_path), Parallel(), "decode")


def test_an_import_that_breaks_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise OSError("libcuda.so.1: cannot open shared object file\nNo such file")

    monkeypatch.setattr("serving.engine.trtllm.api.importlib.import_module", broken)
    with pytest.raises(StartError) as caught:
        load_api()
    assert "libcuda.so.1" in caught.value.message
    assert "\n" not in caught.value.message


def test_an_engine_that_dies_at_its_start_is_one_line(tmp_path: Path) -> None:
    save_model(tmp_path)
    with installed("main") as package:
        error = RuntimeError("CUDA out of memory.\nTried to allocate 2.00 GiB")

        def dies(self: Any, *args: Any, **kwargs: Any) -> None:
            raise error

        package.LLM.__init__ = dies
        dies.__signature__ = Contract("main").signature("LLM", "__init__")  # type: ignore[attr-defined]
        with pytest.raises(StartError) as caught:
            build_trtllm_engine(engine_config(), tmp_path, Parallel(), "decode")
    assert "does not start" in caught.value.message
    assert "CUDA out of memory. Tried" in caught.value.message
    assert "\n" not in caught.value.message


def test_a_checkpoint_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"config\.json"):
        build_trtllm_engine(engine_config(), tmp_path, Parallel(), "decode")


# ---------------------------------------------------------------- generate_async(...)


@versions
def test_sampling_parameters_in_the_engines_words(api: Api, version: str) -> None:
    greedy = engine_params(api, work(1, prompt(9)), [EOS, 7])
    assert (greedy.top_k, greedy.temperature, greedy.max_tokens) == (1, None, 6)
    assert (greedy.end_id, greedy.stop_token_ids) == (EOS, [7])
    assert greedy.include_stop_str_in_output
    assert not greedy.detokenize
    sampled = engine_params(
        api,
        work(
            1,
            prompt(9),
            n_prompt=5,
            max_tokens=20,
            min_tokens=6,
            temperature=0.7,
            top_p=0.9,
            min_p=0.1,
            seed=(1 << 64) - 1,
            presence_penalty=0.5,
            repetition_penalty=1.1,
            stop_token_ids=(9,),
            ignore_eos=True,
            logprobs=0,
        ),
        [EOS, 7],
    )
    assert sampled.top_k == 0  # off, never -1
    assert (sampled.temperature, sampled.top_p, sampled.min_p) == (0.7, 0.9, 0.1)
    assert 0 <= sampled.seed < 1 << 63
    # A resume: 4 tokens of the answer are there already.
    assert (sampled.max_tokens, sampled.min_tokens) == (16, 2)
    assert sampled.prompt_ignore_length == 5
    assert (sampled.presence_penalty, sampled.repetition_penalty) == (0.5, 1.1)
    assert (sampled.stop_token_ids, sampled.ignore_eos) == ([9], True)
    assert sampled.logprobs == 1


@versions
def test_parameters_are_a_fresh_object_a_call(api: Api, version: str) -> None:
    asked = work(1, prompt(9))
    assert engine_params(api, asked, [EOS]) is not engine_params(api, asked, [EOS])


GUIDED = {
    "json": (Guided("json", '{"type": "object"}'), {"json": '{"type": "object"}'}),
    "json_object": (Guided("json_object"), {"json_object": True}),
    "regex": (Guided("regex", "[a-c]+"), {"regex": "[a-c]+"}),
    "grammar": (Guided("grammar", 'root ::= "a"'), {"grammar": 'root ::= "a"'}),
    "choice": (choice(["yes", "no (never)"]), {"regex": r"(yes|no\ \(never\))"}),
}


@versions
@pytest.mark.parametrize("name", GUIDED)
def test_guided_decoding_sets_exactly_one_rule(api: Api, version: str, name: str) -> None:
    guided, expected = GUIDED[name]
    made = engine_params(api, work(1, prompt(9), guided=guided), [EOS]).guided_decoding
    fields = {field for field in type(made).__dataclass_fields__ if getattr(made, field)}
    assert {field: getattr(made, field) for field in fields} == expected


@versions
def test_a_bound_answer_is_not_taken_up_in_its_middle(api: Api, version: str) -> None:
    half = work(1, prompt(9), n_prompt=5, guided=Guided("json_object"))
    with pytest.raises(ValueError, match="cannot be resumed"):
        engine_params(api, half, [EOS])


@versions
def test_what_the_engine_cannot_do_is_the_requests_error(version: str, tmp_path: Path) -> None:
    with running(version, tmp_path) as heard:
        asked = {
            1: work(1, prompt(9), guided=Guided("json_object")),  # no backend is configured
            2: work(2, prompt(9), logit_bias={3: 1.0}),
            3: work(3, prompt(9), adapter="unknown"),
            4: work(4, prompt(1024)),
        }
        for number, each in asked.items():
            heard.engine.submit(each)
            heard.until(lambda number=number: heard.failure(number))  # type: ignore[misc]
            failure = heard.failure(number)
            assert failure is not None
            assert not failure[1]  # not elsewhere either
        assert len(heard.local(9, prompt(9))) == 6
        assert heard.engine.died is None


@versions
def test_salt_adapter_priority_and_retention_are_passed_on(version: str, tmp_path: Path) -> None:
    section: dict[str, Any] = {
        "lora": {"b": "/b", "a": "/a"},
        "prompt_retention": 80,
        "decode_retention": 10,
    }
    with running(version, tmp_path, **section) as heard:
        heard.local(1, prompt(9), adapter="b", priority=3)
        asked = heard.machine.seen[-1]
        assert asked["cache_salt"] == salt_of(NAMESPACE)
        assert (asked["lora_request"].lora_name, asked["lora_request"].lora_path) == ("b", "/b")
        assert asked["lora_request"].lora_int_id == 2
        retention = asked["kv_cache_retention_config"]
        (kept,) = retention.token_range_retention_configs
        assert (kept.token_start, kept.token_end, kept.priority) == (0, None, 80)
        assert retention.decode_retention_priority == 10
        if version == "main":
            assert asked["priority"] == pytest.approx(0.8)
        heard.local(2, prompt(9))
        assert heard.machine.seen[-1]["lora_request"] is None
        assert heard.machine.seen[-1].get("priority", 0.5) == 0.5


def test_ids_of_hand_overs_never_meet_the_engines_own() -> None:
    for attempt in (0, 1, MIN_GLOBAL_ID - 1, MIN_GLOBAL_ID, (1 << 62) + 5, (1 << 63) - 2, (1 << 63) - 1):
        assert MIN_GLOBAL_ID <= global_id(attempt) < (1 << 63) - 1  # type: ignore[arg-type]
    known = document()["disagg_request_id"]
    assert (known["min_global_id"], known["max_exclusive"]) == (MIN_GLOBAL_ID, (1 << 63) - 1)


# ---------------------------------------------------------------- the state


@versions
def test_the_state_survives_the_way_and_holds_no_pickle(api: Api, version: str) -> None:
    fields: dict[str, Any] = {
        "request_type": "context_only",
        "first_gen_tokens": [5],
        "ctx_request_id": 3,
        "opaque_state": bytes(range(256)),
        "draft_tokens": [1, 2],
        "multimodal_embedding_handles": [{"handle": 1}],
    }
    if version == "main":
        assert api.logprob is not None
        fields |= {
            "first_gen_log_probs": [{5: api.logprob(-0.25, 1), 6: api.logprob(-1.5, 2)}],
            "disagg_request_id": MIN_GLOBAL_ID + 1,
            "ctx_usage": {"prompt_tokens": 9},
        }
    there = unpack_state(api, pack_state(api, handed(api, fields)))
    assert there.request_type == "generation_only"
    assert there.multimodal_embedding_handles is None  # a handle into the sender's memory
    for name in set(fields) - {"request_type", "multimodal_embedding_handles"}:
        assert getattr(there, name) == fields[name], name


def handed(api: Api, fields: dict[str, Any]) -> Any:
    completion = SimpleNamespace(disaggregated_params=api.disaggregated_params(**fields))
    return SimpleNamespace(outputs=[completion])


def test_a_state_of_a_newer_peer_is_refused_by_name() -> None:
    with installed("main"):
        newer = load_api()
    with installed("1.2.1"):
        older = load_api()
    fields = {"first_gen_tokens": [1], "disagg_request_id": MIN_GLOBAL_ID, "ctx_dp_rank": 0}
    packed = pack_state(newer, handed(newer, fields))
    with pytest.raises(StateError, match="ctx_dp_rank, disagg_request_id"):
        unpack_state(older, packed)
    for garbage in (b"", b"\x93\x01", b"\xc4\x01a", packed[:-3]):
        with pytest.raises(StateError):
            unpack_state(newer, garbage)
    with pytest.raises(StateError, match="no first token"):
        pack_state(newer, handed(newer, {"ctx_request_id": 1}))


def test_logprobs_of_a_token() -> None:
    class Logprob:
        def __init__(self, logprob: float) -> None:
            self.logprob = logprob

    entry = {5: Logprob(-2.0), 6: Logprob(-0.5), 7: Logprob(-1.0)}
    assert token_logprobs(entry, 5, 2) == TokenLogprobs(5, -2.0, [(6, -0.5), (7, -1.0)])
    assert token_logprobs(entry, 6, 0) == TokenLogprobs(6, -0.5, [])
    assert token_logprobs(-0.75, 5, 1) == TokenLogprobs(5, -0.75, [(5, -0.75)])
    with pytest.raises(ValueError, match="no logprob for token 9"):
        token_logprobs(entry, 9, 1)


# ---------------------------------------------------------------- outputs


@versions
def test_growing_lists_become_differences(version: str, tmp_path: Path) -> None:
    with running(version, tmp_path, fake={"step_ms": 1}) as heard:
        tokens = heard.local(1, prompt(20), max_tokens=30, logprobs=2)
        assert len(tokens) == 30  # `Heard.tokens` refuses a position told twice
        entries = [e for o in heard.outputs for e in o.logprobs.values()]
        assert [entry.token for entry in entries] == tokens
        assert all(len(entry.top) == 2 for entry in entries)
        assert heard.reason(1) == "length"


@versions
@pytest.mark.parametrize("n", [0, 3])
def test_an_eos_ends_it_on_either_side(version: str, n: int, tmp_path: Path) -> None:
    """eos_first_token: as first token it ends the request without a hand-over."""
    fake = {"eos_after": n}
    with (
        running(version, tmp_path / "p", "prefill", fake) as prefill,
        running(version, tmp_path / "d", "decode", fake) as decode,
    ):
        whole = decode.local(1, prompt(20))
        assert (len(whole), whole[-1], decode.reason(1)) == (n + 1, EOS, "stop")
        chunk = prefill.prefill(2, prompt(20))
        if n == 0:
            assert chunk.token is None
            assert prefill.reason(2) == "stop"
            assert prefill.tokens(2) == {0: EOS}
            return
        decode.decode(3, prompt(20), chunk)
        decode.until(lambda: decode.reason(3))
        assert decode.reason(3) == "stop"
        assert list(prefill.tokens(2)) == [0]
        assert 0 not in decode.tokens(3)  # told once, by prefill
        assert {**prefill.tokens(2), **decode.tokens(3)} == dict(enumerate(whole))


@versions
def test_one_token_is_the_whole_answer(version: str, tmp_path: Path) -> None:
    """context_only writes max_tokens = 1 into its parameters; a limit of one is the client's own."""
    with running(version, tmp_path, "prefill") as prefill:
        chunk = prefill.prefill(1, prompt(20), max_tokens=1)
        assert (chunk.token, prefill.reason(1)) == (None, "length")
        chunk = prefill.prefill(2, prompt(20), max_tokens=2)
        assert chunk.token is not None
        assert chunk.state
        assert chunk.blocks == []


@versions
def test_two_prompts_are_not_mixed_up(version: str, tmp_path: Path) -> None:
    with (
        running(version, tmp_path / "p", "prefill") as prefill,
        running(version, tmp_path / "d") as decode,
    ):
        chunk = prefill.prefill(1, prompt(20))
        decode.decode(2, prompt(20, salt=1), chunk)
        decode.until(lambda: decode.failure(2))
        failure = decode.failure(2)
        assert failure is not None
        assert "another prompt" in failure[0]


@versions
def test_pulls_and_loans_have_an_end(version: str, tmp_path: Path) -> None:
    """Nothing of it is cached here, as far as a reader of our own can know."""
    from array import array

    from serving.engine.base import AttemptId

    with running(version, tmp_path) as heard:
        heard.local(1, prompt(20), pull_tokens=16)
        reserved = [r for output in heard.outputs for r in output.reserved]
        assert [(r.attempt, r.blocks) for r in reserved] == [(1, [])]
        heard.engine.lend(AttemptId(7), NAMESPACE, array("I", prompt(20)))
        heard.until(lambda: heard.chunk(7))
        chunk = heard.chunk(7)
        assert chunk is not None
        assert (chunk.token, chunk.last) == (None, True)


# ---------------------------------------------------------------- placement


def test_mpi_takes_one_bundle_and_ray_one_a_rank() -> None:
    from serving.config import PoolConfig

    pool = PoolConfig(cpus=4, gpus=4, labels={"gpu": "h200"})
    options, group = reserved(pool, Parallel(2, 2), "mpi")
    assert options == {"num_cpus": 4, "num_gpus": 4}
    assert group == {}
    options, group = reserved(pool, Parallel(2, 2), "ray")
    assert options == {"num_cpus": 4, "num_gpus": 0}
    assert group["placement_group_bundles"] == [{"CPU": 4}] + [{"GPU": 1}] * 4
    assert group["placement_group_strategy"] == "PACK"
    assert group["placement_group_bundle_label_selector"] == [{"gpu": "h200"}] * 5


def test_ranks_take_bundles_of_the_replicas_own_group() -> None:
    """ray 59064, vllm 29688: a group nested in a replica is placed anywhere, or never."""

    group = SimpleNamespace(bundle_specs=[{"CPU": 4.0}, {"GPU": 1.0}, {"GPU": 1.0}])
    assert ray_placement(group) == {
        "placement_groups": [group],
        "placement_bundle_indices": [[1, 2]],
        "per_worker_gpu_share": 1.0,
    }
    with pytest.raises(StartError, match="placement group"):
        ray_placement(None)


def test_a_node_without_what_the_engine_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    check_node(Parallel(), "mpi", 1)
    check_node(Parallel(), "mpi", None)
    with pytest.raises(ConfigError, match=r"= 4; this worker has 1 GPUs.*orchestrator: ray"):
        check_node(Parallel(2, 2), "mpi", 1)
    usage = type("Usage", (), {"total": 64 << 20})()
    monkeypatch.setattr("serving.engine.trtllm.placement.shutil.disk_usage", lambda path: usage)
    check_node(Parallel(), "mpi", 1)  # one rank exchanges nothing
    with pytest.raises(StartError, match=r"/dev/shm has 64 MiB; 2 GPUs.*1024 MiB.*--shm-size"):
        check_node(Parallel(2), "ray", None)


def test_capabilities_say_what_falls_back(tmp_path: Path) -> None:
    with running("main", tmp_path) as heard:
        can = heard.engine.capabilities
        assert can.moves_kv
        lacks = (can.streamed_handoff, can.seeded_resume, can.migrate_kv, can.block_states)
        assert lacks == (False,) * 4
        assert not can.guided  # without a backend
    config = EngineConfig(kind="tensorrt_llm", trtllm=TrtllmConfig(guided_backend="llguidance"))
    from serving.engine.trtllm.capabilities import capabilities_of

    assert capabilities_of(config.trtllm).guided


def test_the_mode_decides_the_request_type(tmp_path: Path) -> None:
    with running("main", tmp_path, "prefill") as heard:
        heard.local(1, prompt(9))
        heard.prefill(2, prompt(9))
        kinds = [row["kind"] for row in heard.machine.seen]
        assert kinds == ["context_and_generation", "context_and_generation", "context_only"]
        assert Mode.LOCAL  # the first is the answer that `build` waits for


# ---------------------------------------------------------------- settings

SETTINGS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "section of another engine": (
        {"engine": {"kind": "torch", "trtllm": {"cuda_graph": False}}},
        ["engine.trtllm is for engine kind 'tensorrt_llm', not 'torch'"],
    ),
    "dtype": (
        {"engine": {"kind": "tensorrt_llm", "dtype": "float16"}},
        ["engine.dtype is not for", "use engine.trtllm.dtype"],
    ),
    "step": (
        {"engine": {"kind": "tensorrt_llm", "chunk_tokens": 4096}},
        ["engine.chunk_tokens is not for", "use engine.trtllm.max_num_tokens"],
    ),
    "gpus": (
        {"engine": {"kind": "tensorrt_llm"}, "prefill": {"gpus": 1}},
        ["decode.gpus = 0; allowed: 1"],
    ),
    "unknown key": (
        {"engine": {"kind": "tensorrt_llm", "trtllm": {"max_batch_size": 4}}},
        ["unknown key models[0].variants[0].engine.trtllm.max_batch_size"],
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_contradict_each_other(name: str) -> None:
    variant, parts = SETTINGS[name]
    with pytest.raises(ConfigError) as caught:
        load_config({"models": [{"name": "m", "variants": [{"weights": "w", **variant}]}]})
    for part in parts:
        assert part in caught.value.message
