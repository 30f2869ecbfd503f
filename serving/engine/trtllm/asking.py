"""One call of the engine: prompt, parameters, salt, adapter, priority, and what was handed over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serving.config import TrtllmConfig
from serving.engine.base import AttemptId, Mode, Work
from serving.engine.trtllm.api import Api
from serving.engine.trtllm.events import salt_of
from serving.engine.trtllm.sampling import engine_params

MIN_GLOBAL_ID = 1 << 40  # smaller ids are the engine's own
_HIGH = 1 << 62
_MIDDLE_PRIORITY = 0.5
_PRIORITY_STEP = 0.1


class Asking:
    """`ask` on the loop that will wait for the answer."""

    def __init__(self, api: Api, llm: Any, config: TrtllmConfig, eos_ids: Sequence[int]) -> None:
        self._api = api
        self._llm = llm
        self._config = config
        self._eos_ids = list(eos_ids)
        self._adapters = {name: number for number, name in enumerate(sorted(config.lora), 1)}
        self._knows_global_ids = "disagg_request_id" in api.disaggregated_fields
        self._knows_priority = "priority" in api.generate_arguments

    def ask(self, work: Work, handed: Any) -> Any:
        """The engine's RequestOutput. `handed`: DECODE, the parameters that prefill handed over.

        Raises what the engine raises; ValueError for what it cannot do.
        """
        arguments: dict[str, Any] = {
            "sampling_params": engine_params(self._api, work, self._eos_ids),
            "streaming": work.mode is not Mode.PREFILL,
            "disaggregated_params": self._disaggregated(work) if handed is None else handed,
            "cache_salt": salt_of(work.namespace),
        }
        if work.adapter is not None:
            arguments["lora_request"] = self._adapter(work.adapter)
        if work.priority and self._knows_priority:
            wanted = _MIDDLE_PRIORITY + _PRIORITY_STEP * work.priority
            arguments["priority"] = min(max(wanted, 0.0), 1.0)
        retention = self._retention()
        if retention is not None:
            arguments["kv_cache_retention_config"] = retention
        return self._llm.generate_async({"prompt_token_ids": work.tokens.tolist()}, **arguments)

    def _disaggregated(self, work: Work) -> Any:
        if work.mode is Mode.LOCAL:
            return self._api.disaggregated_params(request_type="context_and_generation")
        fields: dict[str, Any] = {"request_type": "context_only"}
        if self._knows_global_ids:
            fields["disagg_request_id"] = global_id(work.attempt)
        return self._api.disaggregated_params(**fields)

    def _adapter(self, name: str) -> Any:
        number = self._adapters.get(name)
        if number is None or self._api.lora_request is None:
            raise ValueError(f"no adapter {name!r}; configured: {', '.join(self._adapters) or 'none'}")
        return self._api.lora_request(name, number, self._config.lora[name])

    def _retention(self) -> Any:
        """How long blocks outlive their request; None leaves it to the engine."""
        config, api = self._config, self._api
        if config.prompt_retention is None and config.decode_retention is None:
            return None
        if api.retention is None or api.token_range is None:
            return None
        ranges = []
        if config.prompt_retention is not None:
            ranges.append(api.token_range(0, None, config.prompt_retention))
        if config.decode_retention is None:
            return api.retention(ranges)
        return api.retention(ranges, config.decode_retention)


def global_id(attempt: AttemptId) -> int:
    """The name of a hand-over on both sides; attempts are unique over all frontends and time."""
    number = int(attempt) & (2 * _HIGH - 1)
    return number if MIN_GLOBAL_ID <= number < 2 * _HIGH - 1 else (number % MIN_GLOBAL_ID) | _HIGH
