"""What the fault benchmark says of a stream, on streams that are broken by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest

from benchmarks.fault_app import change, histogram_ms
from benchmarks.fault_client import Answer, Ask, Exchange
from benchmarks.fault_verdict import difference, judge, wait_after_ms

ASK = Ask(prompt=(1, 2, 3), max_tokens=4)
WORDS = ["a", "b", "c", "d"]
USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 4,
    "total_tokens": 7,
    "prompt_tokens_details": {"cached_tokens": 2},
}


@pytest.mark.parametrize(
    ("got", "expected", "lost_repeated"),
    [
        ("abcd", "abcd", (0, 0)),
        ("ab", "abcd", (2, 0)),
        ("abd", "abcd", (1, 0)),
        ("abbcd", "abcd", (0, 1)),
        ("abab", "abcd", (2, 2)),
        ("bacd", "abcd", (1, 1)),
        ("wxyz", "abcd", (4, 4)),
        ("", "abcd", (4, 0)),
        ("wxyz", None, (0, 0)),
        ("wxyzz", None, (0, 1)),
        ("wx", None, (2, 0)),
    ],
    ids=[
        "equal",
        "ends",
        "hole",
        "twice",
        "restarts",
        "order",
        "other",
        "nothing",
        "count",
        "more",
        "fewer",
    ],
)
def test_tokens_are_judged_by_position(
    got: str, expected: str | None, lost_repeated: tuple[int, int]
) -> None:
    assert difference(list(got), None if expected is None else list(expected), 4) == lost_repeated


def stream(words: list[str], usage: dict[str, Any] | None, *, ending: bytes) -> Answer:
    """As the server sends it, in pieces of seven bytes that came 10 ms apart."""
    said: list[dict[str, Any]] = [
        {"choices": [{"text": f" {word}", "logprobs": None, "finish_reason": None}]} for word in words
    ]
    said.append({"choices": [{"text": "", "logprobs": None, "finish_reason": "length"}]})
    if usage is not None:
        said.append({"choices": [], "usage": usage})
    body = b"".join(b"data: " + orjson.dumps(event) + b"\n\n" for event in said) + b"data: [DONE]\n\n"
    chunks = b"".join(
        b"%x\r\n%s\r\n" % (len(body[i : i + 40]), body[i : i + 40]) for i in range(0, len(body), 40)
    )
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nx-kvrelay-decode: w1\r\n\r\n"
    exchange = Exchange(ASK, "m")
    data = head + chunks + ending
    exchange.arrivals = [(i / 700, data[i : i + 7]) for i in range(0, len(data), 7)]
    return exchange.answer()


@pytest.mark.parametrize(
    ("words", "usage", "ending", "verdict"),
    [
        (WORDS, USAGE, b"0\r\n\r\n", (True, 0, False)),
        (WORDS[:3], USAGE, b"0\r\n\r\n", (True, 1, False)),
        (WORDS, USAGE, b"", (False, 0, False)),
        (WORDS, None, b"0\r\n\r\n", (True, 0, True)),
        (WORDS, {**USAGE, "prompt_tokens": 5, "total_tokens": 9}, b"0\r\n\r\n", (True, 0, True)),
        (WORDS, {**USAGE, "prompt_tokens_details": {"cached_tokens": 4}}, b"0\r\n\r\n", (True, 0, True)),
    ],
    ids=["whole", "short", "cut", "no-usage", "billed-twice", "cached-too-much"],
)
def test_a_stream_is_whole_or_it_is_not(
    words: list[str], usage: dict[str, Any] | None, ending: bytes, verdict: tuple[bool, int, bool]
) -> None:
    answer = stream(words, usage, ending=ending)
    judged = judge(answer, WORDS)
    assert answer.decode_worker == "w1"
    assert (judged.completed, judged.lost, judged.wrong_usage) == verdict


@pytest.mark.parametrize(
    ("words", "generated", "verdict"),
    [
        (WORDS[:3], 4, (False, 0, 0, False)),
        (WORDS[:2], 3, (True, 0, 0, False)),
        (WORDS[:2], 4, (True, 0, 0, True)),
        (WORDS[:1], 3, (True, 1, 0, False)),
        (WORDS[:3], 3, (True, 0, 1, False)),
    ],
    ids=["did-not-stop", "stopped", "billed-more", "short", "shows-its-stop"],
)
def test_a_stop_string_ends_a_stream_where_it_should(
    words: list[str], generated: int, verdict: tuple[bool, int, int, bool]
) -> None:
    """It was to end with the third of four words, which is billed and not shown."""
    usage = {**USAGE, "completion_tokens": generated, "total_tokens": 3 + generated}
    answer = stream(words, usage, ending=b"0\r\n\r\n")
    if generated == 4 and len(words) == 3:
        answer = replace(answer, ask=replace(ASK, stop=" c", stops_after=4))
    else:
        answer = replace(answer, ask=replace(ASK, stop=" c", stops_after=3), finish="stop")
    judged = judge(answer, WORDS)
    assert (judged.completed, judged.lost, judged.repeated, judged.wrong_usage) == verdict


def test_a_named_token_has_its_logprob() -> None:
    exchange = Exchange(replace(ASK, max_tokens=2, named_tokens=True), "m")
    logprobs = {"tokens": [" a", " b"], "token_logprobs": [-0.5, None]}
    said = {"choices": [{"text": " a b", "logprobs": logprobs, "finish_reason": "length"}], "usage": USAGE}
    body = b"data: " + orjson.dumps(said) + b"\n\ndata: [DONE]\n\n"
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    exchange.arrivals = [(0.0, head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))]
    answer = exchange.answer()
    assert (answer.tokens, answer.error) == ([" a", " b"], "a token without its logprob")
    assert not judge(answer, [" a", " b"]).completed


def test_an_error_event_is_no_end() -> None:
    exchange = Exchange(ASK, "m")
    body = b'data: {"error":{"message":"lost"}}\n\n'
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    exchange.arrivals = [(0.0, head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))]
    judged = judge(exchange.answer(), WORDS)
    assert (judged.completed, judged.lost) == (False, 4)


def test_waits_count_from_the_fault_on() -> None:
    answer = replace(stream(WORDS, USAGE, ending=b"0\r\n\r\n"), sent_s=0.0, times_s=[1.0, 1.5, 4.0, 4.1])
    assert wait_after_ms(answer, 2.0) == pytest.approx(2000)
    assert wait_after_ms(answer, 4.05) == pytest.approx(50)
    assert wait_after_ms(answer, 0.5) == pytest.approx(2500)
    assert wait_after_ms(answer, 9.0) == 0


def test_a_quantile_lies_within_its_bucket() -> None:
    def seen(*counts: float) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        bounds = ("0.01", "0.02", "+Inf")
        return {("x_bucket", (("le", le),)): count for le, count in zip(bounds, counts, strict=True)}

    assert histogram_ms(seen(5, 5, 5), seen(5, 105, 105), "x", 0.5) == 15
    assert histogram_ms(seen(0, 0, 0), seen(0, 0, 9), "x", 0.5) == 20, "beyond the last bound"
    assert histogram_ms(seen(1, 2, 3), seen(1, 2, 3), "x", 0.5) is None
    assert change(seen(9, 9, 9), seen(4, 4, 4), "x_bucket", le="+Inf") == 4, "it began anew"
