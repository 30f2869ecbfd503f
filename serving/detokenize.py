"""Token ids to text for one request: the only place that knows stop strings and half characters.

Text leaves through `push` as soon as nothing can change it any more. Held back are the bytes of a character
that is not complete yet, and text that may be the start of a stop string; `flush` gives them out when
the request ends for another reason. However the tokens are split over calls, the text is the same: that of
all tokens, cut before the stop string that is complete first (of several that end there, the longest).
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from serving.engine.base import TokenLogprobs
from serving.tokenizer import Tokenizer

_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class TokenText(NamedTuple):
    """One token as logprob entries show it; special tokens have no `raw`, so bytes join to the text."""

    text: str
    raw: bytes
    logprob: float


class LogprobEntry(NamedTuple):
    chosen: TokenText
    top: list[TokenText]


class Vocabulary:
    """What the detokenisers of one model share: raw bytes, and text where a token is text by itself."""

    __slots__ = ("_spellings", "raw", "texts")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._spellings = tokenizer.token_bytes
        special = tokenizer.special_ids
        self.raw = tuple(b"" if i in special else raw for i, raw in enumerate(tokenizer.token_bytes))
        # None: not a whole number of characters, goes through the UTF-8 decoder
        self.texts = tuple(_text_or_none(raw) for raw in self.raw)

    def bytes_of(self, token: int) -> bytes:
        """What the token adds to the text; nothing for special tokens and ids that have no token."""
        return self.raw[token] if 0 <= token < len(self.raw) else b""

    def entries(self, logprobs: Iterable[TokenLogprobs]) -> list[LogprobEntry]:
        """Logprob entries with text and bytes."""
        return [
            LogprobEntry(self._show(e.token, e.logprob), [self._show(*pair) for pair in e.top])
            for e in logprobs
        ]

    def _show(self, token: int, logprob: float) -> TokenText:
        spelling = self._spellings[token] if 0 <= token < len(self._spellings) else b""
        return TokenText(spelling.decode("utf-8", "replace"), self.bytes_of(token), logprob)


class Detokenizer:
    """State of one request.

    Attributes:
        stopped: a stop string was found; later tokens are ignored.
        n_tokens: tokens taken, up to and including the one that completed the stop string.
    """

    __slots__ = (
        "_hidden",
        "_matcher",
        "_min_tokens",
        "_plain",
        "_texts",
        "_utf8",
        "_utf8_waiting",
        "_vocabulary",
        "n_tokens",
        "stopped",
    )

    def __init__(
        self,
        vocabulary: Vocabulary,
        stop: Sequence[str] = (),
        *,
        hidden: frozenset[int] = frozenset(),
        min_tokens: int = 0,
    ) -> None:
        """`hidden` tokens have no text; no stop string is looked for in the first `min_tokens` tokens."""
        self._vocabulary = vocabulary
        self._texts = vocabulary.texts
        self._utf8 = _new_utf8_decoder("replace")
        self._utf8_waiting = False  # the decoder holds the start of a character
        self._matcher = StopMatcher(stop) if stop else None
        self._hidden = hidden
        self._plain = not stop and not hidden
        self._min_tokens = min_tokens
        self.stopped = False
        self.n_tokens = 0

    def push(self, tokens: list[int]) -> str:
        """The text that `tokens` make final, maybe none."""
        if len(tokens) == 1 and self._plain and not self._utf8_waiting:  # the common case
            token = tokens[0]
            text = self._texts[token] if token < len(self._texts) else ""
            if text is not None:
                self.n_tokens += 1
                return text
        parts = []
        for token in tokens:
            if self.stopped:
                break
            self.n_tokens += 1
            parts.append(self._match(self._decode(token)))
        return "".join(parts)

    def flush(self) -> str:
        """The held tail, once the request ended otherwise than by a stop; half a character is U+FFFD."""
        if self.stopped:
            return ""
        tail = self._match(self._utf8.decode(b"", True))
        self._utf8_waiting = False
        if self._matcher is not None and not self.stopped:
            tail += self._matcher.release()
        return tail

    def _decode(self, token: int) -> str:
        if token in self._hidden:
            return ""
        if not self._utf8_waiting:
            text = self._texts[token] if token < len(self._texts) else ""
            if text is not None:
                return text
        text = self._utf8.decode(self._vocabulary.bytes_of(token))
        self._utf8_waiting = bool(self._utf8.getstate()[0])
        return text

    def _match(self, text: str) -> str:
        matcher = self._matcher
        if matcher is None or self.n_tokens <= self._min_tokens:
            return text
        text = matcher.feed(text)
        self.stopped = matcher.matched
        return text


class StopMatcher:
    """Finds the first of several stop strings in a text that comes in pieces, one pass over it.

    A Knuth-Morris-Pratt automaton a string: its state is how many of its characters the text ends with,
    so the most of them is what must be held back.
    """

    __slots__ = ("_automata", "_first_chars", "_held", "matched")

    def __init__(self, stop: Sequence[str]) -> None:
        """`stop`: non-empty strings."""
        self._automata = [_Automaton(s) for s in stop]
        self._first_chars = frozenset(s[0] for s in stop)
        self._held = ""  # the end of the text so far, a start of some stop string
        self.matched = False

    def feed(self, text: str) -> str:
        """The text that is free to go; sets `matched` when a stop string is complete."""
        if not self._held and self._first_chars.isdisjoint(text):
            return text
        for n, char in enumerate(text):
            longest = 0
            for automaton in self._automata:
                if automaton.advance(char):
                    longest = max(longest, len(automaton.pattern))
            if longest:
                self.matched = True
                seen = self._held + text[: n + 1]
                self._held = ""
                return seen[:-longest]
        seen = self._held + text
        free = len(seen) - max(automaton.state for automaton in self._automata)
        self._held = seen[free:]
        return seen[:free]

    def release(self) -> str:
        """What was held back; the text is over."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    __slots__ = ("_border", "pattern", "state")

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.state = 0  # characters of `pattern` that the text ends with
        # _border[k]: length of the longest proper prefix of pattern[:k + 1] that also ends it
        self._border = [0] * len(pattern)
        k = 0
        for i in range(1, len(pattern)):
            while k and pattern[i] != pattern[k]:
                k = self._border[k - 1]
            if pattern[i] == pattern[k]:
                k += 1
            self._border[i] = k

    def advance(self, char: str) -> bool:
        """Take one character; true when the text now ends with the whole pattern (nothing may follow)."""
        state = self.state
        while state and self.pattern[state] != char:
            state = self._border[state - 1]
        if self.pattern[state] == char:
            state += 1
        self.state = state
        return state == len(self.pattern)


def _text_or_none(raw: bytes) -> str | None:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return None
