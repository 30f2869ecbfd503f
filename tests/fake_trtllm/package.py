"""The modules `tensorrt_llm...` of one profile, put together from the contract and the machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from zlib import crc32

from tests.fake_trtllm.contract import Contract, document
from tests.fake_trtllm.feed import Feed, Iteration
from tests.fake_trtllm.machine import Machine
from tests.fake_trtllm.requests import (
    CONTEXT_ONLY,
    GENERATION_ONLY,
    MIN_GLOBAL_ID,
    WHOLE,
    Request,
    Response,
)


class RequestError(RuntimeError):
    """That request only."""


class EngineDeadError(RuntimeError):
    """The engine is gone."""


def build(profile: str) -> dict[str, ModuleType]:
    """Modules by name; nothing is installed."""
    contract = Contract(profile)
    classes: dict[str, Any] = {}
    for entry in document()["classes"]:
        name = entry["qualified_name"].rpartition(".")[2]
        if contract.knows(name):
            classes[name] = contract.make(name)
    classes |= {"RequestError": RequestError, "EngineDeadError": EngineDeadError}
    classes["CompletionOutput"] = _completion_output(classes["CompletionOutput"])
    classes["RequestOutput"] = _request_output(contract, classes)
    classes["LLM"] = _llm(contract, classes)
    return _modules(contract, classes)


@contextmanager
def installed(profile: str) -> Iterator[ModuleType]:
    """`import tensorrt_llm` finds the fake while this is open."""
    modules = build(profile)
    before = {name: module for name, module in sys.modules.items() if _ours(name)}
    for name in before:
        del sys.modules[name]
    sys.modules.update(modules)
    try:
        yield modules["tensorrt_llm"]
    finally:
        for name in [name for name in sys.modules if _ours(name)]:
            del sys.modules[name]
        sys.modules.update(before)


def _ours(name: str) -> bool:
    return name == "tensorrt_llm" or name.startswith("tensorrt_llm.")


def _modules(contract: Contract, classes: dict[str, Any]) -> dict[str, ModuleType]:
    """As the contract lists what may be imported from where."""
    modules: dict[str, ModuleType] = {}

    def module(name: str) -> ModuleType:
        if name not in modules:
            modules[name] = ModuleType(name)
            modules[name].__path__ = []
            parent, _, last = name.rpartition(".")
            if parent:
                setattr(module(parent), last, modules[name])
        return modules[name]

    for where, names in document()["imports"].items():
        for name in names:
            value = _find(contract, classes, name)
            if value is not None:
                setattr(module(where.partition("(")[0]), name, value)
    module("tensorrt_llm.disaggregated_params").DisaggregatedParams = classes["DisaggregatedParams"]  # type: ignore[attr-defined]
    retention = classes["KvCacheRetentionConfig"]
    retention.TokenRangeRetentionConfig = classes["TokenRangeRetentionConfig"]
    module("tensorrt_llm").__version__ = f"fake-{contract.profile}"  # type: ignore[attr-defined]
    return modules


def _find(contract: Contract, classes: dict[str, Any], name: str) -> Any:
    if name in classes:
        return classes[name]
    if name == "get_global_disagg_request_id":
        return lambda node_id, process_id=0: MIN_GLOBAL_ID + (node_id << 6) + process_id
    if name == "DEFAULT_REQUEST_PRIORITY":
        return 0.5
    try:
        return contract.enum(name)
    except KeyError:
        return None  # the contract says that it is there and no more


def _completion_output(base: Any) -> Any:
    class CompletionOutput(base):  # type: ignore[misc]
        """`token_ids` and `logprobs` grow; what `*_diff` tells is new since the last step."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._last = 0
            self._last_logprobs = 0

        @property
        def length(self) -> int:
            return len(self.token_ids)

        @property
        def text_diff(self) -> str:
            return ""

        @property
        def token_ids_diff(self) -> list[int]:
            return list(self.token_ids[self._last :])

        @property
        def logprobs_diff(self) -> list[Any]:
            return list(self.logprobs[self._last_logprobs :])

    return CompletionOutput


def _request_output(contract: Contract, classes: dict[str, Any]) -> Any:
    class RequestOutput:
        """One object a request: every step changes it and hands it out again."""

        def __init__(self, number: int, ids: list[int], machine: Machine) -> None:
            self.request_id = number
            self.prompt: str | None = None
            self.prompt_token_ids = ids
            self.outputs = [classes["CompletionOutput"](0)]
            self.finished = False
            self.context_logits = None
            self.mm_embedding_handle = None
            self.cached_tokens = 0
            self.avg_decoded_tokens_per_iter: float | None = None
            self.decoding_iter = 0
            self.disaggregated_params: Any = None
            self.metrics_dict: dict[str, Any] = {}
            self._cached = 0
            self._aborted = False
            self._feed = Feed()
            self._machine = machine
            self._request: Request | None = None

        def abort(self) -> None:
            self._aborted = True
            assert self._request is not None
            self._machine.abort(self._request)

        def aborted(self) -> bool:
            return self._aborted

        def __aiter__(self) -> RequestOutput:
            return self

        async def __anext__(self) -> RequestOutput:
            if self.finished:
                raise StopAsyncIteration
            return self._take(await self._feed.get())

        async def aresult(self) -> RequestOutput:
            while not self.finished:
                self._take(await self._feed.get())
            return self

        def __await__(self) -> Any:
            return self.aresult().__await__()

        def result(self, timeout: float | None = None) -> RequestOutput:
            while not self.finished:
                self._take(self._feed.wait(timeout))
            return self

        def _push(self, response: Response) -> None:
            self._feed.push(response)

        def _take(self, response: Response) -> RequestOutput:
            output = self.outputs[0]
            output._last, output._last_logprobs = len(output.token_ids), len(output.logprobs)
            if response.error is not None:
                self.finished = True
                raise response.error
            output.token_ids += response.tokens
            output.logprobs += response.logprobs
            self.cached_tokens = self._cached
            self.decoding_iter += 1
            if response.finish is not None:
                output.finish_reason = response.finish
                output.disaggregated_params = self.disaggregated_params = response.handover
                self.finished = True
            return self

    del contract
    return RequestOutput


def _llm(contract: Contract, classes: dict[str, Any]) -> Any:
    def init(self: Any, **kwargs: Any) -> None:
        known = {field["name"] for field in contract.fields("TorchLlmArgs")}
        for name in kwargs:
            if name not in known:
                raise ValueError(f"LLM got invalid argument: {name}")
        self.args = classes["TorchLlmArgs"](**kwargs)
        self.machine = Machine(contract, self.args, classes)
        self._executor = _Executor(self.machine)

    def generate_async(self: Any, **asked: Any) -> Any:
        return _submit(self, contract, classes, asked)

    def check_health(self: Any) -> bool:
        return self.machine.fatal is None

    def events_async(self: Any, timeout: float | None) -> Iteration:
        return Iteration(self.machine.poll_events, timeout)

    def stats_async(self: Any, timeout: float | None) -> Iteration:
        return Iteration(self.machine.poll_stats, timeout)

    def capacity(self: Any) -> dict[str, int]:
        machine = self.machine
        return {
            "maxNumBlocks": machine.total,
            "tokensPerBlock": machine.block,
            "maxNumTokens": machine.total * machine.block,
        }

    verbs: dict[str, Any] = {
        "__init__": init,
        "generate_async": generate_async,
        "get_stats": lambda self, timeout: self.machine.poll_stats(),
        "get_stats_async": stats_async,
        "get_kv_cache_events": lambda self, timeout: self.machine.poll_events(),
        "get_kv_cache_events_async": events_async,
        "get_kv_cache_capacity": capacity,
        "shutdown": lambda self: self.machine.stop(),
        "_check_health": check_health,
    }
    members: dict[str, Any] = {
        name: contract.signed("LLM", name, verb)
        for name, verb in verbs.items()
        if contract.method("LLM", name) is not None
    }
    members["__enter__"] = lambda self: self
    members["__exit__"] = lambda self, *exc: self.machine.stop()
    if contract.method("LLM", "disaggregated_params") is not None:
        members["disaggregated_params"] = property(lambda self: {})
    members["llm_id"] = property(lambda self: self.machine.name)
    members["tokenizer"] = property(lambda self: None)
    return type("LLM", (), members)


class _Executor:
    """Private, and all that a watchdog has to look at."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    @property
    def _fatal_error(self) -> BaseException | None:
        return self._machine.fatal


def _submit(llm: Any, contract: Contract, classes: dict[str, Any], asked: dict[str, Any]) -> Any:
    machine: Machine = llm.machine
    if machine.stopped or machine.fatal is not None:
        raise RuntimeError("LLM is shutting down")
    inputs, params = asked["inputs"], asked["sampling_params"] or classes["SamplingParams"]()
    ids = list(inputs["prompt_token_ids"] if isinstance(inputs, dict) else inputs)
    if not all(isinstance(token, int) for token in ids):
        raise TypeError("prompt_token_ids are ints")
    if params.end_id is None and machine.args.skip_tokenizer_init:
        raise ValueError("end_id must be set without a tokenizer")
    if params.top_k is not None and params.top_k < 0:
        raise ValueError("top_k must not be negative")
    if params.guided_decoding is not None and machine.args.guided_decoding_backend is None:
        raise ValueError("guided decoding needs guided_decoding_backend")
    if asked["lora_request"] is not None and not machine.args.enable_lora:
        raise ValueError("LoRA is not enabled")
    if not 0.0 <= asked.get("priority", 0.5) <= 1.0:
        raise ValueError("priority is from 0 to 1")
    handed = asked["disaggregated_params"]
    kind = WHOLE if handed is None else str(handed.request_type).lower()
    if kind not in (CONTEXT_ONLY, GENERATION_ONLY, WHOLE):
        raise ValueError(f"unknown request type {kind}")
    transceiver = machine.args.cache_transceiver_config
    python = getattr(transceiver, "transceiver_runtime", None) == "PYTHON"
    if kind in (CONTEXT_ONLY, GENERATION_ONLY):
        if transceiver is None or transceiver.backend is None:
            raise ValueError("no cache transceiver is configured")
        if python and handed.disagg_request_id is None:
            raise ValueError("disagg_request_id is needed")
    if kind == CONTEXT_ONLY:
        params.max_tokens = 1  # in place: it is the caller's object
    if kind == GENERATION_ONLY:
        _check_state(handed, ids, python)
    elif len(ids) > machine.args.max_num_tokens and not machine.args.enable_chunked_prefill:
        raise RequestError(f"the prompt is longer than max_num_tokens ({machine.args.max_num_tokens})")
    if len(ids) >= machine.context:
        raise RequestError("the prompt is longer than max_seq_len")
    number = machine.next_id()
    output = classes["RequestOutput"](number, ids, machine)
    lora = asked["lora_request"]
    request = Request(
        number,
        ids,
        params,
        kind,
        handed,
        asked["cache_salt"],
        lora.lora_name if lora is not None else None,
        bool(asked["streaming"]),
        output,
    )
    if machine.knobs.request_errors:
        machine.knobs.request_errors -= 1
        request.fails = True
    output._request = request
    machine.seen.append({**asked, "kind": kind, "max_tokens": params.max_tokens})
    machine.submit(request)
    return output


def _check_state(handed: Any, ids: list[int], python: bool) -> None:
    from array import array
    from json import loads

    if not handed.first_gen_tokens:
        raise ValueError("generation_only without first_gen_tokens")
    if python:
        if handed.disagg_request_id < MIN_GLOBAL_ID or not handed.ctx_info_endpoint:
            raise ValueError("no context server is named")
        return
    if handed.opaque_state is None or handed.ctx_request_id is None:
        raise ValueError("generation_only without opaque_state")
    if loads(handed.opaque_state)["prompt"] != crc32(array("I", ids).tobytes()):
        raise RequestError("the state is of another prompt")
