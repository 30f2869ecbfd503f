"""Text to token ids and token ids to raw bytes, over the `tokenizers` library alone.

torch and transformers are not imported: a frontend starts in tens of milliseconds. Token ids become
text through a table of raw bytes (one entry a token), so that joining tokens is joining bytes and a
character split over tokens is put together again by a UTF-8 decoder (serving/detokenize.py).
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers

from serving.engine.base import TOKEN_TYPECODE
from serving.errors import StartError

TokenBytes = tuple[bytes, ...]

_BYTE_TOKEN = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")


class Tokenizer:
    """One model's tokenizer.

    Attributes:
        vocab_size: every id is below it (ids without a token have empty bytes).
        special_ids: ids of special tokens; they are not rendered.
        token_bytes: raw bytes by id; a special token's entry is its own spelling.
        longest_token: most characters of text that one token can stand for; None when there is no such
            limit (an unknown-word token stands for any word).
    """

    def __init__(self, source: tokenizers.Tokenizer) -> None:
        self._source = source
        layout = json.loads(source.to_str())
        added = {entry["id"]: entry for entry in layout.get("added_tokens", [])}
        vocab = source.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocab.values(), default=-1) + 1
        self.special_ids = frozenset(i for i, entry in added.items() if entry["special"])
        self.token_bytes = _token_bytes(source, layout.get("decoder"), vocab, self.vocab_size, added)
        kinds = {step["type"] for step in _decoder_steps(layout.get("decoder"))}
        byte_exact = bool(kinds & {"ByteLevel", "ByteFallback"})
        self.longest_token = max(len(raw) for raw in self.token_bytes) if byte_exact and vocab else None
        self._ids = vocab

    @classmethod
    def from_file(cls, path: Path) -> Tokenizer:
        """Raises StartError when `path` is no tokenizer.json that this library reads."""
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises bare Exception
            raise StartError(f"tokenizer {path}: {error}") from error

    def encode(self, text: str, *, add_special_tokens: bool) -> array[int]:
        """Token ids of `text`; `add_special_tokens` adds what the model wants around a plain text (BOS).

        `encode_batch_fast` of one text, because `encode` holds the GIL all along: with 108 k tokens the
        event loop stalled 172 ms behind a thread in `encode`, and 2-4 ms behind this one.
        """
        found = self._source.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return array(TOKEN_TYPECODE, found[0].ids)

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of `len(encode(text))` without encoding; 0 when none is known.

        Half of what `longest_token` gives, because normalisers may shorten a text.
        """
        return len(text) // (2 * self.longest_token) if self.longest_token else 0

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids` without special tokens; bytes that are no UTF-8 become U+FFFD."""
        table, special = self.token_bytes, self.special_ids
        raw = b"".join([table[i] for i in ids if i not in special])
        return raw.decode("utf-8", "replace")

    def source_json(self) -> str:
        """The tokenizer as the content of a tokenizer.json."""
        return self._source.to_str()

    def id_of(self, token: str) -> int | None:
        return self._ids.get(token)


def _token_bytes(
    source: tokenizers.Tokenizer,
    decoder: dict[str, Any] | None,
    vocab: dict[str, int],
    vocab_size: int,
    added: dict[int, dict[str, Any]],
) -> TokenBytes:
    """Raw bytes by id, for the decoder that tokenizer.json names.

    Byte-level alphabets and SentencePiece (Metaspace, byte fall-back) are exact. Any other decoder is asked
    for one token at a time, which loses only what it does *between* tokens.
    """
    steps = _decoder_steps(decoder)
    kinds = {step["type"] for step in steps}
    table = [b""] * vocab_size
    if "ByteLevel" in kinds:
        alphabet = _byte_alphabet()
        for token, i in vocab.items():
            table[i] = _from_alphabet(token, alphabet)
    elif kinds & {"Metaspace", "ByteFallback"}:
        space = next((s["replacement"] for s in steps if s["type"] == "Metaspace"), "\u2581")
        fallback = "ByteFallback" in kinds
        for token, i in vocab.items():
            byte = _BYTE_TOKEN.match(token) if fallback else None
            table[i] = bytes([int(byte[1], 16)]) if byte else token.replace(space, " ").encode()
    else:
        for token, i in vocab.items():
            text = source.decode([i], skip_special_tokens=False) if decoder else token
            table[i] = text.encode("utf-8", "replace")
    for i, entry in added.items():
        table[i] = entry["content"].encode("utf-8", "replace")
    return tuple(table)


def _decoder_steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The decoder as a flat list: a Sequence holds others."""
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _decoder_steps(inner)]
    return [decoder]


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte in byte-level vocabularies.

    Bytes that print in Latin-1 stand for themselves; the others, in order, are the characters from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + k): byte for k, byte in enumerate(others)})
    return alphabet


def _from_alphabet(token: str, alphabet: dict[str, int]) -> bytes:
    try:
        return bytes([alphabet[char] for char in token])
    except KeyError:  # a token outside the alphabet is spelled as it is
        return token.encode("utf-8", "replace")
