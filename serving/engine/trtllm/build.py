"""From a variant to a running TensorRT-LLM engine that has answered once."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvrouter.hashing import namespace_seed
from serving.config import EngineConfig, Parallel
from serving.engine.base import AttemptId, KVMemory, Mode, SamplingParams, Work
from serving.engine.trtllm.api import Api, load_api, one_line
from serving.engine.trtllm.arguments import llm_arguments
from serving.engine.trtllm.asking import Asking
from serving.engine.trtllm.checkpoint import Checkpoint, check_shape, read_checkpoint
from serving.engine.trtllm.engine import TrtllmEngine
from serving.engine.trtllm.events import EventTranslator
from serving.engine.trtllm.layout import layout_of
from serving.engine.trtllm.placement import check_node
from serving.errors import ConfigError, StartError
from serving.manifest import model_digest

log = logging.getLogger("kvrelay.engine")

FIRST_ANSWER_S = 600.0  # kernels are tuned and graphs captured by then, or something is wrong
CAPACITY_S = 20.0
PROBE = (1, 2, 3)


def build_trtllm_engine(
    config: EngineConfig,
    directory: Path,
    parallel: Parallel,
    role: str,
    *,
    gpus: int | None = None,
    placement: Mapping[str, Any] | None = None,
    topology: str = "",
) -> TrtllmEngine:
    """`role`: prefill or decode. `gpus`: how many this process may use, None when nobody knows.
    `placement`: of the Ray orchestrator. `topology`: of both pools, as in "tp2pp1>tp1pp1". Blocks for as
    long as the weights take.

    Raises ConfigError or StartError, one line.
    """
    checkpoint = read_checkpoint(directory)
    check_shape(checkpoint, parallel, config.trtllm, config.block_tokens)
    check_node(parallel, config.trtllm.orchestrator, gpus)
    api = load_api()
    arguments = llm_arguments(api, config, parallel, role, checkpoint, placement=placement)
    try:
        llm = api.llm(**arguments)
    except Exception as error:
        raise StartError(f"TensorRT-LLM does not start with {directory}: {one_line(error)}") from error
    try:
        return _first_answer(api, llm, config, checkpoint, topology)
    except BaseException:
        llm.shutdown()
        raise


def _first_answer(
    api: Api, llm: Any, config: EngineConfig, checkpoint: Checkpoint, topology: str
) -> TrtllmEngine:
    card = checkpoint.card
    asking = Asking(api, llm, config.trtllm, sorted(card.eos_token_ids))
    params = SamplingParams(max_tokens=1, seed=0, temperature=0.0, ignore_eos=True)
    probe = Work(
        AttemptId(0), Mode.LOCAL, array("I", PROBE), len(PROBE), params, namespace_seed("kvrelay-probe")
    )
    try:
        asking.ask(probe, None).result(timeout=FIRST_ANSWER_S)
    except Exception as error:
        raise StartError(f"TensorRT-LLM started and answers nothing: {one_line(error)}") from error
    events = EventTranslator(config.block_tokens)
    block_bytes = checkpoint.kv_block_bytes(config.block_tokens, config.trtllm.kv_dtype)
    return TrtllmEngine(
        api=api,
        llm=llm,
        asking=asking,
        config=config.trtllm,
        events=events,
        memory=KVMemory(0, block_bytes, _capacity(llm, events, config.block_tokens), kind="VRAM"),
        layout=layout_of(api, config, checkpoint, model_digest(checkpoint.directory), topology),
        block_tokens=config.block_tokens,
        context_tokens=checkpoint.context_tokens(config.trtllm.max_seq_len),
    )


def _capacity(llm: Any, events: EventTranslator, block_tokens: int) -> int:
    """Blocks on the GPU: asked for, else from statistics, else from the first event, whatever is there."""
    ask = getattr(llm, "get_kv_cache_capacity", None)
    if ask is not None:
        try:
            told = ask()
            _check_block(int(told["tokensPerBlock"]), block_tokens)
            return int(told["maxNumBlocks"])
        except (KeyError, TypeError, NotImplementedError) as error:
            log.info("get_kv_cache_capacity tells nothing (%r)", error)
    until_s = time.monotonic() + CAPACITY_S
    while time.monotonic() < until_s:
        for row in llm.get_stats(timeout=1):
            cache = row.get("kvCacheStats")
            if cache is not None:
                _check_block(int(cache["tokensPerBlock"]), block_tokens)
                return int(cache["maxNumBlocks"])
        events.translate(llm.get_kv_cache_events(timeout=1))
        if events.total_blocks is not None:
            return events.total_blocks
    raise StartError(
        f"TensorRT-LLM tells no KV capacity within {CAPACITY_S:.0f} s, neither by statistics nor by events"
    )


def _check_block(told: int, asked: int) -> None:
    if told != asked:
        raise ConfigError(f"engine.block_tokens = {asked}; this model's engine uses blocks of {told}")
