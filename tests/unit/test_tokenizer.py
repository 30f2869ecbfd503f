"""Raw bytes of tokens, for the decoders that models use."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from serving.errors import StartError
from serving.tokenizer import Tokenizer
from tests.tiny_tokenizer import END, ids, tiny_tokenizer


@settings(deadline=None)
@given(st.text())
def test_byte_level_bytes_join_to_the_text(text: str) -> None:
    tokenizer = tiny_tokenizer()
    raw = b"".join(tokenizer.token_bytes[i] for i in ids(text))
    assert raw == text.encode()


def test_special_tokens_are_known_and_not_decoded() -> None:
    tokenizer = tiny_tokenizer()
    end = tokenizer.id_of(END)
    assert end is not None
    assert end in tokenizer.special_ids
    assert tokenizer.decode([*ids("one"), end, *ids(" two")]) == "one two"
    assert all(i < tokenizer.vocab_size for i in tokenizer.special_ids)


def test_sentencepiece_bytes() -> None:
    vocab = [
        ("<unk>", 0.0),
        ("<0xE2>", -9.0),
        ("<0x82>", -9.0),
        ("<0xAC>", -9.0),
        ("\u2581hi", -1.0),
        ("x", -2.0),
    ]
    source = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    source.pre_tokenizer = pre_tokenizers.Metaspace()
    source.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer = Tokenizer(source)
    assert tokenizer.token_bytes[1:] == (b"\xe2", b"\x82", b"\xac", b" hi", b"x")
    assert tokenizer.decode([5, 1, 2, 3, 4]) == "x\u20ac hi"


def test_metaspace_without_byte_fallback_has_no_longest_token() -> None:
    source = tokenizers.Tokenizer(
        models.Unigram([("<unk>", 0.0), ("_hi", -1.0)], unk_id=0, byte_fallback=False)
    )
    source.decoder = decoders.Metaspace(replacement="_")
    tokenizer = Tokenizer(source)
    assert tokenizer.token_bytes[1] == b" hi"
    assert tokenizer.fewest_tokens("x" * 1000) == 0


def test_other_decoders_are_asked_token_by_token() -> None:
    source = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2}, unk_token="[UNK]"))
    source.decoder = decoders.WordPiece()
    source.add_special_tokens([AddedToken("[CLS]", special=True)])
    tokenizer = Tokenizer(source)
    assert tokenizer.token_bytes[1] == b"play"
    assert tokenizer.token_bytes[3] == b"[CLS]"
    assert 3 in tokenizer.special_ids


@settings(deadline=None)
@given(st.text(max_size=300))
def test_fewest_tokens_is_a_lower_bound(text: str) -> None:
    assert tiny_tokenizer().fewest_tokens(text) <= len(ids(text))


def test_an_unreadable_file_is_a_start_error(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    with pytest.raises(StartError, match=r"tokenizer\.json"):
        Tokenizer.from_file(file)
