"""Text leaves in pieces, and the pieces join to what a naive reference says."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serving.detokenize import Detokenizer
from serving.engine.base import TokenLogprobs
from tests.tiny_tokenizer import END, ids, tiny_tokenizer, tiny_vocabulary


def cut(text: str, stop: Sequence[str]) -> str:
    """The reference: the text before the stop string that is complete first, of equals the longest."""
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    return text[: min(ends)[1]] if ends else text


def run(tokens: list[int], stop: Sequence[str], sizes: Sequence[int]) -> tuple[str, list[str], Detokenizer]:
    """Push `tokens` in pieces of `sizes` (repeated); the whole text, the pieces, the detokeniser."""
    detokenizer = Detokenizer(tiny_vocabulary(), stop)
    deltas = []
    at, turn = 0, 0
    while at < len(tokens):
        size = sizes[turn % len(sizes)]
        deltas.append(detokenizer.push(tokens[at : at + size]))
        at, turn = at + size, turn + 1
    deltas.append(detokenizer.flush())
    return "".join(deltas), deltas, detokenizer


letters = st.text(alphabet="ab\u20ac\U0001f389", max_size=30)
stops = st.lists(st.text(alphabet="ab\u20ac\U0001f389", min_size=1, max_size=5), max_size=4)
sizes = st.lists(st.integers(1, 5), min_size=1, max_size=6)


@settings(deadline=None)
@given(letters, stops, sizes)
@example("aabaab", ["aabaaa", "abaab"], [1])
@example("abab", ["abab", "bab", "ab"], [2])
@example("ab", ["abb"], [1])
def test_any_split_equals_the_reference(text: str, stop: list[str], sizes: list[int]) -> None:
    got, _, detokenizer = run(ids(text), stop, sizes)
    assert got == cut(text, stop)
    assert detokenizer.stopped == (got != text)


@settings(deadline=None)
@given(st.lists(st.integers(0, tiny_tokenizer().vocab_size - 1), max_size=30), stops, sizes)
def test_any_tokens_equal_the_reference(tokens: list[int], stop: list[str], sizes: list[int]) -> None:
    """Also bytes that are no UTF-8: U+FFFD as in a decode of the whole."""
    assert run(tokens, stop, sizes)[0] == cut(tiny_tokenizer().decode(tokens), stop)


@settings(deadline=None)
@given(letters, sizes)
def test_nothing_is_held_back_without_need(text: str, sizes: list[int]) -> None:
    """Without stop strings only an incomplete character waits."""
    detokenizer = Detokenizer(tiny_vocabulary())
    tokens = ids(text)
    raw = b""
    out = ""
    for token in tokens:
        raw += tiny_vocabulary().bytes_of(token)
        out += detokenizer.push([token])
        assert len(raw) - len(out.encode()) < 4
    assert out == text


def test_a_character_over_several_tokens_comes_whole() -> None:
    tokens = ids("\U0001f389")
    assert len(tokens) > 1
    _, deltas, _ = run(tokens, [], [1])
    assert [d for d in deltas if d] == ["\U0001f389"]


def test_an_incomplete_character_at_the_end_is_replaced() -> None:
    assert run(ids("a\U0001f389")[:-1], [], [1])[0] == "a\ufffd"


def test_n_tokens_ends_with_the_token_that_completed_the_stop() -> None:
    tokens = ids("one two three four")
    _, _, detokenizer = run(tokens, ["two"], [len(tokens)])
    completed = next(n for n in range(len(tokens)) if "two" in tiny_tokenizer().decode(tokens[:n]))
    assert detokenizer.n_tokens == completed < len(tokens)


def test_special_and_unknown_tokens_have_no_text() -> None:
    end = tiny_tokenizer().id_of(END)
    assert end is not None
    tokens = [*ids("one"), end, 10**9, *ids(" two")]
    for size in (1, 3):
        assert run(tokens, [], [size])[0] == "one two"


def test_no_stop_is_seen_before_min_tokens() -> None:
    tokens = ids("one two one two")
    detokenizer = Detokenizer(tiny_vocabulary(), ["two"], min_tokens=len(ids("one two")))
    text = "".join(detokenizer.push([token]) for token in tokens)
    assert text == "one two one "
    assert detokenizer.stopped


def test_stop_tail_flushed() -> None:
    """Text that could have been a stop string's start is not lost."""
    text, deltas, detokenizer = run(ids("Hello, world"), ["world!!"], [1])
    assert text == "Hello, world"
    assert deltas[-1] == "world"
    assert not detokenizer.stopped


def test_a_long_stop_string_is_linear() -> None:
    """A hostile pattern must not make each character cost its length."""
    stop = "a" * 1000 + "b"
    text, _, _ = run(ids("a" * 20_000), [stop], [50])
    assert text == "a" * 20_000


@pytest.mark.parametrize("text", ["日本語のテキスト", "a 🎉 party 🏳️‍🌈", "plain"])
def test_logprobs_bytes_are_utf8(text: str) -> None:
    tokens = ids(text)
    entries = tiny_vocabulary().entries(TokenLogprobs(t, -1.0, [(t, -1.0)]) for t in tokens)
    assert b"".join(entry.chosen.raw for entry in entries).decode() == text
    assert all(entry.top[0] == entry.chosen for entry in entries)


def test_a_special_token_in_logprobs_shows_its_name_and_no_bytes() -> None:
    end = tiny_tokenizer().id_of(END)
    assert end is not None
    (entry,) = tiny_vocabulary().entries([TokenLogprobs(end, -1.0, [])])
    assert entry.chosen.text == END
    assert entry.chosen.raw == b""
