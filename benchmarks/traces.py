"""Public request traces: lengths, arrivals and prefix hashes, without any text."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path

import orjson

__all__ = ["TRACE_NAMES", "TraceRequest", "load_trace", "traces_dir"]

BLOCK_TOKENS = 512  # what one hash of a Mooncake trace stands for
_FILES = {"conversation": "mooncake_conversation.jsonl.gz", "synthetic": "mooncake_synthetic.jsonl.gz"}
TRACE_NAMES = tuple(_FILES)


@dataclass(frozen=True, slots=True)
class TraceRequest:
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    hashes: tuple[int, ...]  # chained, of every block; the last one may be partial


def traces_dir(given: str | None) -> Path:
    """`given`, or the shared traces beside the repository. Raises FileNotFoundError with one line."""
    path = Path(given) if given is not None else Path(__file__).parents[2] / "shared" / "data" / "traces"
    if not path.is_dir():
        raise FileNotFoundError(
            f"no traces in {path}: pass --traces DIR with Mooncake's FAST25 traces, gzipped"
            f" ({', '.join(_FILES.values())})"
        )
    return path


def load_trace(name: str, folder: Path, speed: float = 1.0, limit: int | None = None) -> list[TraceRequest]:
    """In order of arrival; `speed` 2 is twice the rate. Raises FileNotFoundError with one line."""
    path = folder / _FILES[name]
    if not path.is_file():
        raise FileNotFoundError(f"the trace {path} is missing; --traces DIR names another folder")
    requests: list[TraceRequest] = []
    with gzip.open(path, "rb") as lines:
        for line in lines:
            if limit is not None and len(requests) >= limit:
                break
            row = orjson.loads(line)
            requests.append(
                TraceRequest(
                    row["timestamp"] / 1e3 / speed,
                    row["input_length"],
                    row["output_length"],
                    tuple(row["hash_ids"]),
                )
            )
    requests.sort(key=lambda request: request.arrival_s)
    return requests
