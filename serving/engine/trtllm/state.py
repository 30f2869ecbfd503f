"""What prefill hands to decode, as bytes: the engine's own parameters in msgpack, nothing else.

Fields travel by name, so a version that has more of them hands more over; one that a peer lacks is an
error there, told in a line. Handles into the sender's memory (images) and tensors never travel.
"""

from __future__ import annotations

from typing import Any

import msgspec

from serving.engine.trtllm.api import Api

STATE_VERSION = 1
_STAYS = {
    "request_type",
    "schedule_style",
    "first_gen_logits",
    "multimodal_embedding_handles",
    "mrope_position_ids_handle",
    "mrope_position_deltas_handle",
}
_LOGPROBS = "first_gen_log_probs"


class _State(msgspec.Struct, array_like=True):
    version: int
    fields: dict[str, Any]


class StateError(Exception):
    """The state cannot be packed, or is none that this engine could use."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_State)


def pack_state(api: Api, output: Any) -> bytes:
    """Of the RequestOutput of a context_only request that is done. Raises StateError."""
    params = output.outputs[0].disaggregated_params or getattr(output, "disaggregated_params", None)
    if params is None:
        raise StateError("the engine handed nothing over")
    fields = {
        name: value
        for name in api.disaggregated_fields - _STAYS
        if (value := getattr(params, name, None)) is not None
    }
    if not fields.get("first_gen_tokens"):
        raise StateError("the engine gave no first token with its state")
    try:
        if _LOGPROBS in fields:
            fields[_LOGPROBS] = [_flat(entry) for entry in fields[_LOGPROBS]]
        return _encoder.encode(_State(STATE_VERSION, fields))
    except (TypeError, AttributeError, OverflowError) as error:
        raise StateError(f"the engine's state cannot be packed: {error}") from error


def unpack_state(api: Api, data: bytes) -> Any:
    """The DisaggregatedParams for a generation_only request. Raises StateError."""
    try:
        state = _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise StateError(f"malformed state: {error}") from error
    fields = dict(state.fields)
    strange = set(fields) - api.disaggregated_fields
    if state.version != STATE_VERSION or strange:
        names = ", ".join(sorted(strange)) or f"version {state.version}"
        raise StateError(f"the peer's tensorrt_llm hands over what this one does not know: {names}")
    try:
        if _LOGPROBS in fields:
            fields[_LOGPROBS] = [_entries(api, entry) for entry in fields[_LOGPROBS]]
        return api.disaggregated_params(request_type="generation_only", **fields)
    except (TypeError, ValueError) as error:
        raise StateError(f"the peer's state is refused: {error}") from error


def _flat(entry: Any) -> Any:
    """One position: {token: Logprob} as rows, or a plain number as it is."""
    if isinstance(entry, dict):
        return [[token, value.logprob, value.rank] for token, value in entry.items()]
    if isinstance(entry, list):
        return [_flat(inner) for inner in entry]
    return float(entry)


def _entries(api: Api, entry: Any) -> Any:
    if isinstance(entry, list) and api.logprob is not None:
        if entry and isinstance(entry[0], list) and entry[0] and isinstance(entry[0][0], list):
            return [_entries(api, inner) for inner in entry]
        return {token: api.logprob(logprob, rank) for token, logprob, rank in entry}
    return entry
