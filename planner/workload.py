"""What a simulation is fed with: public traces and synthetic load, as lengths, arrivals and prefix hashes.

    mooncake      conversation, synthetic   lengths and prefix hashes; arrivals in steps of 3 s
    azure         code, conv                lengths
    servegen      deepseek-r1               clients' rates, burstiness and lengths by window, drawn anew
    made up       Poisson around a rate, with a daily wave or a burst

Every loader returns requests in order of arrival. There is no text in any of them.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

__all__ = [
    "BLOCK_TOKENS",
    "MOST_REQUESTS",
    "TRACE_NAMES",
    "TraceRequest",
    "load_trace",
    "made_up",
    "servegen_day",
    "traces_dir",
]

BLOCK_TOKENS = 512  # what one hash of a Mooncake trace stands for
WINDOW_S = 600.0  # of ServeGen's rates
MOST_REQUESTS = 10_000_000  # of a load; more would not fit into memory
_MOONCAKE = {"conversation": "mooncake_conversation.jsonl.gz", "synthetic": "mooncake_synthetic.jsonl.gz"}
_AZURE = {"azure-code": "azure2023_code.csv.gz", "azure-conv": "azure2023_conv.csv.gz"}
_SERVEGEN = "servegen-day"
TRACE_NAMES = (*_MOONCAKE, *_AZURE, _SERVEGEN)


@dataclass(frozen=True, slots=True)
class TraceRequest:
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    hashes: tuple[int, ...] = ()  # chained, of every block; the last one may be partial; (): none known


def traces_dir(given: str | None) -> Path:
    """`given`, or the shared traces beside the repository. Raises FileNotFoundError with one line."""
    path = Path(given) if given is not None else Path(__file__).parents[2] / "shared" / "data" / "traces"
    if not path.is_dir():
        files = ", ".join((*_MOONCAKE.values(), *_AZURE.values()))
        raise FileNotFoundError(
            f"no traces in {path}: pass --traces DIR with some of {files}, "
            "or --trace made-up, which needs none"
        )
    return path


def load_trace(
    name: str, folder: Path, speed: float = 1.0, limit: int | None = None, seed: int = 0
) -> list[TraceRequest]:
    """`speed` 2 is twice the rate. Raises FileNotFoundError with one line, ValueError for a wrong name or
    a file of something else."""
    if name not in TRACE_NAMES:
        raise ValueError(f"trace {name!r}; allowed: {', '.join(TRACE_NAMES)}")
    try:
        return _loaded(name, folder, speed, limit, seed)
    except (EOFError, KeyError, TypeError, json.JSONDecodeError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(
            f"the trace {name} in {folder} is not as its authors publish it, gzipped: {error}"
        ) from None


def _loaded(name: str, folder: Path, speed: float, limit: int | None, seed: int) -> list[TraceRequest]:
    if name == _SERVEGEN:
        return servegen_day(folder, scale=speed, seed=seed)[:limit]
    path = folder / (_MOONCAKE | _AZURE)[name]
    if not path.is_file():
        raise FileNotFoundError(f"the trace {path} is missing; --traces DIR names another folder")
    rows = _mooncake_rows(path) if name in _MOONCAKE else _azure_rows(path)
    requests = sorted(rows, key=lambda request: request.arrival_s)[:limit]
    return [TraceRequest(r.arrival_s / speed, r.prompt_tokens, r.output_tokens, r.hashes) for r in requests]


def _mooncake_rows(path: Path) -> Iterator[TraceRequest]:
    with gzip.open(path, "rb") as lines:
        for line in lines:
            row = json.loads(line)
            yield TraceRequest(
                row["timestamp"] / 1e3, row["input_length"], row["output_length"], tuple(row["hash_ids"])
            )


def _azure_rows(path: Path) -> Iterator[TraceRequest]:
    with gzip.open(path, "rt", newline="") as lines:
        first: datetime | None = None
        for row in csv.DictReader(lines):
            at = datetime.fromisoformat(row["TIMESTAMP"][:26])  # the source has a digit too many
            first = first or at
            yield TraceRequest(
                (at - first).total_seconds(),
                max(int(row["ContextTokens"]), 1),
                max(int(row["GeneratedTokens"]), 1),
            )


def servegen_day(
    folder: Path, scale: float = 1.0, seed: int = 0, hours: float | None = None
) -> list[TraceRequest]:
    """ServeGen's deepseek-r1 pool over its day: each client a renewal process of its own.

    Times between a client's requests are drawn from the distribution and burstiness given for the window
    and stretched to `scale` times its rate, which keeps the burstiness. Lengths are drawn from the
    client's own, of the window at hand or the one before.
    """
    generator = random.Random(seed)
    clients = folder / "servegen_deepseek-r1_clients.csv.gz"
    lengths = folder / "servegen_deepseek-r1_lengths.jsonl.gz"
    for path in (clients, lengths):
        if not path.is_file():
            raise FileNotFoundError(f"the trace {path} is missing; --traces DIR names another folder")
    drawn = _client_lengths(lengths)
    windows: dict[int, list[tuple[float, float, float, str]]] = {}
    with gzip.open(clients, "rt", newline="") as lines:
        for row in csv.DictReader(lines):
            windows.setdefault(int(row["client"]), []).append(
                (float(row["t_s"]), float(row["rate_rps"]) * scale, float(row["cv"]), row["pattern"])
            )
    expected = WINDOW_S * sum(rate for rows in windows.values() for _, rate, *_ in rows)
    if expected > MOST_REQUESTS:
        raise ValueError(
            f"about {expected:,.0f} requests at {scale:g} times the rate; allowed: {MOST_REQUESTS:,}"
        )
    end_s = math.inf if hours is None else hours * 3600
    requests: list[TraceRequest] = []
    for client, rows in windows.items():
        own = drawn.get(client)
        if own is None:
            continue
        for begin_s, rate, cv, pattern in sorted(rows):
            if begin_s >= end_s:
                break
            at_s = begin_s + generator.random() / rate
            prompts, outputs = own.at(begin_s)
            while at_s < min(begin_s + WINDOW_S, end_s):
                requests.append(
                    TraceRequest(at_s, max(prompts.draw(generator), 1), max(outputs.draw(generator), 1))
                )
                at_s += _gap(generator, rate, cv, pattern)
    return sorted(requests, key=lambda request: request.arrival_s)


def _gap(generator: random.Random, rate: float, cv: float, pattern: str) -> float:
    """A time between two requests with mean 1/rate and the coefficient of variation `cv`."""
    cv = min(max(cv, 0.05), 20.0)
    if pattern == "Weibull":
        shape = max(cv**-1.086, 0.15)  # the usual approximation of a Weibull's shape by its cv
        return generator.weibullvariate(1.0 / (rate * math.gamma(1.0 + 1.0 / shape)), shape)
    return generator.gammavariate(1.0 / cv**2, cv**2 / rate)


class _Distribution:
    """`{tokens: probability}`."""

    def __init__(self, text: str) -> None:
        pairs = [pair.split(":") for pair in text.strip("{} ").split(",") if pair.strip()]
        self._values = [int(float(value)) for value, _ in pairs]
        self._weights: list[float] = []
        total = 0.0
        for _, weight in pairs:
            total += float(weight)
            self._weights.append(total)

    def draw(self, generator: random.Random) -> int:
        return generator.choices(self._values, cum_weights=self._weights)[0]


class _ClientLengths:
    """One client's distributions by window, parsed when first drawn from."""

    def __init__(self, dataset: dict[str, dict[str, str]]) -> None:
        self._dataset = {float(t): texts for t, texts in dataset.items() if texts.get("input_tokens")}
        self._times = sorted(self._dataset)
        self._parsed: dict[float, tuple[_Distribution, _Distribution]] = {}

    def __len__(self) -> int:
        return len(self._times)

    def at(self, t_s: float) -> tuple[_Distribution, _Distribution]:
        before = [t for t in self._times if t <= t_s]
        window = before[-1] if before else self._times[0]
        if window not in self._parsed:
            texts = self._dataset[window]
            self._parsed[window] = (
                _Distribution(texts["input_tokens"]),
                _Distribution(texts["output_tokens"]),
            )
        return self._parsed[window]


def _client_lengths(path: Path) -> dict[int, _ClientLengths]:
    found: dict[int, _ClientLengths] = {}
    with gzip.open(path, "rb") as lines:
        for line in lines:
            row = json.loads(line)
            own = _ClientLengths(row["dataset"])
            if len(own):
                found[int(row["client"])] = own
    return found


def made_up(
    rate_rps: float,
    duration_s: float,
    prompt_tokens: int = 2000,
    output_tokens: int = 200,
    *,
    spread: float = 0.8,
    wave: float = 0.0,
    wave_s: float = 86_400.0,
    burst: Sequence[float] | None = None,
    seed: int = 0,
) -> list[TraceRequest]:
    """Poisson arrivals around `rate_rps`; lengths are log-normal with these means.

    Args:
        spread: of the logarithm of the lengths; 0 makes all alike.
        wave: 0..1, share of the rate that swings as a sine of period `wave_s`.
        burst: (begin_s, length_s, factor), during which the rate is `factor` times as high.
    """
    generator = random.Random(seed)
    most = rate_rps * (1 + wave) * max(burst[2] if burst else 1.0, 1.0)
    requests: list[TraceRequest] = []
    at_s = 0.0
    while True:
        at_s += generator.expovariate(most)
        if at_s >= duration_s:
            return requests
        rate = rate_rps * (1 - wave * math.cos(2 * math.pi * at_s / wave_s))
        if burst and burst[0] <= at_s < burst[0] + burst[1]:
            rate *= burst[2]
        if generator.random() * most < rate:  # thinning
            prompt, output = (
                max(1, round(mean * math.exp(generator.gauss(-(spread**2) / 2, spread))))
                for mean in (prompt_tokens, output_tokens)
            )
            requests.append(TraceRequest(at_s, prompt, output))
