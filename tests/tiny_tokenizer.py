"""A small byte-level BPE tokenizer and a model around it, made in-process: no files, no network."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from serving.chat import ChatTemplate
from serving.detokenize import Vocabulary
from serving.engine.base import Capabilities
from serving.served_model import ServedModel
from serving.tokenizer import Tokenizer

START, END = "<|start|>", "<|end|>"
CONTEXT_TOKENS = 256
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'user' and loop.previtem and loop.previtem.role == 'user' %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
_CORPUS = [
    "The quick brown fox jumps over the lazy dog. Hello, world!",
    "one two three four five six seven eight nine",
    "relay races hand the baton on; the relay of tokens hands the cache on. 0 1 2 3 4 5 6 7 8 9",
]


@cache
def tiny_tokenizer() -> Tokenizer:
    return Tokenizer(_source())


def save_tiny_tokenizer(directory: Path) -> None:
    """Beside a model's weights, as a user's directory has it."""
    _source().save(str(directory / "tokenizer.json"))


def _source() -> tokenizers.Tokenizer:
    source = tokenizers.Tokenizer(models.BPE())
    source.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    source.decoder = decoders.ByteLevel()
    source.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    source.train_from_iterator(_CORPUS, trainer)
    return source


@cache
def tiny_vocabulary() -> Vocabulary:
    return Vocabulary(tiny_tokenizer())


def tiny_model(
    name: str = "tiny",
    *,
    context_tokens: int = CONTEXT_TOKENS,
    capabilities: Capabilities | None = None,
    template: str | None = TEMPLATE,
) -> ServedModel:
    end = tiny_tokenizer().id_of(END)
    assert end is not None
    return ServedModel(
        name=name,
        tokenizer=tiny_tokenizer(),
        vocabulary=tiny_vocabulary(),
        context_tokens=context_tokens,
        eos_ids=frozenset({end}),
        chat=None if template is None else ChatTemplate(template, {"eos_token": END}),
        capabilities=capabilities or Capabilities(),
        created=1_700_000_000,
    )


def ids(text: str) -> list[int]:
    return list(tiny_tokenizer().encode(text, add_special_tokens=False))
