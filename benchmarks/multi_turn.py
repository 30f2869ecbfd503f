"""What the prefix cache saves a conversation with a real model, on two prefill workers and one decode.

    python -m benchmarks.multi_turn [--json] [--turns 8]

A chat with a system prompt of about 1,000 tokens, one turn after another. Every turn is asked twice: as the
conversation goes on (warm: the router has to find the worker that computed it) and under a `cache_salt` of
its own, which nothing else shares (cold). Greedy fp32, so both answers must be the same text. The answer
is measured from sending to the first event with a token.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.overhead import application
from benchmarks.report import COUNT, Progress, command, print_report
from serving.local_cluster import LocalCluster

MODEL = "smollm2-135m"
BLOCK_TOKENS = 32
ANSWER_TOKENS = 16
TIMEOUT_S = 120
SYSTEM = "You answer in one short sentence. " + " ".join(
    f"Fact {n}: the house with number {n * 7 % 101} belongs to person {n * 13 % 97}, with {n % 9} cats."
    for n in range(42)
)
QUESTIONS = (
    "Who owns the house with number 7?",
    "How many cats live there?",
    "Name a colour you like.",
    "What is the capital of France?",
    "And of Italy?",
    "Which of the two is further north?",
    "What did I ask you first?",
    "Say goodbye.",
)


def config(admin_key_file: Path | None = None) -> dict[str, Any]:
    pool = {"cpus": 0.1, "min_replicas": 0}
    engine = {"kind": "torch", "dtype": "float32", "block_tokens": BLOCK_TOKENS, "kv_bytes": 512 << 20}
    variant = {
        "weights": MODEL,
        "engine": engine,
        "prefill": {**pool, "replicas": 2},
        "decode": {**pool, "replicas": 1},
    }
    args: dict[str, Any] = {
        "models": [{"name": MODEL, "variants": [variant]}],
        # The decode worker holds the conversation too and would go on by itself: here prefill is the point.
        "router": {"local_prefill": False},
        "deadlines": {"silence_ms": 60_000},  # a slow machine is not a hung one
        "admission": {"mode": "off"},
    }
    if admin_key_file is not None:
        args["security"] = {"admin_key_file": str(admin_key_file)}
    return application("serving.app:build", args)


@dataclass(frozen=True)
class Answer:
    text: str
    ttft_ms: float
    prompt_tokens: int
    cached_tokens: int
    headers: Mapping[str, str]  # names in lower case


@dataclass
class Conversation:
    """Messages so far; `ask` adds a question and its answer."""

    url: str
    session: str | None = None
    salt: str | None = None
    messages: list[dict[str, str]] = field(default_factory=lambda: [{"role": "system", "content": SYSTEM}])

    def ask(self, question: str) -> tuple[Answer, list[dict[str, str]]]:
        """The answer, and the messages it answers."""
        asked = [*self.messages, {"role": "user", "content": question}]
        answer = chat(self.url, asked, salt=self.salt, session=self.session)
        self.messages = [*asked, {"role": "assistant", "content": answer.text}]
        return answer, asked


def chat(
    url: str, messages: list[dict[str, str]], *, salt: str | None = None, session: str | None = None
) -> Answer:
    """One streamed request on a connection of its own. Raises RuntimeError on any status but 200."""
    body = {
        "model": MODEL,
        "messages": messages,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if salt is not None:
        body["cache_salt"] = salt
    headers = {"content-type": "application/json"}
    if session is not None:
        headers["x-session-id"] = session
    connection = HTTPConnection(urlsplit(url).netloc, timeout=TIMEOUT_S)
    try:
        sent_s = time.monotonic()
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {response.read(500)!r}")
        first_s: float | None = None
        text = ""
        usage: dict[str, Any] = {}
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            first_s = first_s or time.monotonic()
            event = json.loads(line[6:])
            text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
            usage = event.get("usage") or usage
    finally:
        connection.close()
    if first_s is None or not usage:
        raise RuntimeError("the stream ended early")
    return Answer(
        text=text,
        ttft_ms=(first_s - sent_s) * 1e3,
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        headers={name.lower(): value for name, value in response.getheaders()},
    )


@dataclass
class Outcome:
    """A conversation turn by turn: `warm` as it went on, `cold` the same prompts without any cache."""

    warm: list[Answer] = field(default_factory=list)
    cold: list[Answer] = field(default_factory=list)

    @property
    def warm_ttft_ms(self) -> float:
        """Median of all turns but the first, which finds nothing."""
        return statistics.median(answer.ttft_ms for answer in self.warm[1:])

    @property
    def cold_ttft_ms(self) -> float:
        """Median of the same turns."""
        return statistics.median(answer.ttft_ms for answer in self.cold[1:])

    @property
    def ttft_ratio(self) -> float:
        return self.warm_ttft_ms / self.cold_ttft_ms


def converse(url: str, turns: int = len(QUESTIONS), session: str | None = None) -> Outcome:
    """Both ways by turns, so that a machine that gets slower slows both."""
    outcome = Outcome()
    chat(url, [{"role": "user", "content": "Hello."}], salt="first")  # a process's first request is slow
    chat(url, [{"role": "user", "content": "Hello."}], salt="second")
    conversation = Conversation(url, session)
    for n in range(turns):
        answer, asked = conversation.ask(QUESTIONS[n % len(QUESTIONS)])
        outcome.warm.append(answer)
        outcome.cold.append(chat(url, asked, salt=f"cold-{n}"))
    return outcome


def measure(turns: int, progress: Progress) -> dict[str, Any]:
    with LocalCluster(cpus=4) as cluster:
        progress.say("starting the application")
        cluster.serve(config(), timeout_s=300)
        progress.say(f"{turns} turns, warm and cold")
        outcome = converse(cluster.url, turns)
        another, _ = Conversation(cluster.url).ask("What is this about?")
    return {
        "prompt_tokens": [answer.prompt_tokens for answer in outcome.warm],
        "cached_tokens": [answer.cached_tokens for answer in outcome.warm],
        "cached_tokens_of_another_conversation": another.cached_tokens,
        "equal_answers": [w.text for w in outcome.warm] == [c.text for c in outcome.cold],
        "prefill_workers": len({answer.headers["x-kvrelay-prefill"] for answer in outcome.warm[1:]}),
        "ttft_ms_cold": round(outcome.cold_ttft_ms, 1),
        "ttft_ms_warm": round(outcome.warm_ttft_ms, 1),
        "ttft_ratio": round(outcome.ttft_ratio, 3),
    }


def main() -> None:
    parser = command("multi_turn", __doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--turns", type=COUNT, default=len(QUESTIONS))
    options = parser.parse_args()
    if options.turns < 2:
        parser.error("--turns must be 2 or more: the first turn of a conversation is always cold")
    report = measure(options.turns, Progress(quiet=options.json))
    if options.json:
        print(json.dumps(report))
    else:
        print_report("A conversation, warm and cold", report)


if __name__ == "__main__":
    main()
