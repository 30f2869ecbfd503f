"""The adapter against both versions of the contract: what is asked of the engine, and that it can be.

The fake refuses what the contract does not have, so whatever passes here uses no name that a version lacks.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serving.config import Parallel
from serving.engine.base import Guided, Mode
from serving.engine.trtllm.api import Api, load_api
from serving.engine.trtllm.arguments import RESERVED, RESERVED_IN_SECTIONS, llm_arguments
from serving.engine.trtllm.asking import MIN_GLOBAL_ID, global_id
from serving.engine.trtllm.build import build_trtllm_engine
from serving.engine.trtllm.checkpoint import read_checkpoint
from serving.engine.trtllm.events import salt_of
from serving.engine.trtllm.sampling import engine_params
from serving.engine.trtllm.state import StateError, pack_state, unpack_state
from serving.errors import ConfigError
from serving.guided import choice
from tests.fake_trtllm.contract import Contract, document
from tests.fake_trtllm.package import installed
from tests.unit.trtllm_rig import (
    BLOCK,
    EOS,
    NAMESPACE,
    engine_config,
    prompt,
    running,
    save_model,
    versions,
    work,
)


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


def test_the_mode_decides_the_request_type(tmp_path: Path) -> None:
    with running("main", tmp_path, "prefill") as heard:
        heard.local(1, prompt(9))
        heard.prefill(2, prompt(9))
        kinds = [row["kind"] for row in heard.machine.seen]
        assert kinds == ["context_and_generation", "context_and_generation", "context_only"]
        assert Mode.LOCAL  # the first is the answer that `build` waits for


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
