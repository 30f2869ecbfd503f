"""What the API knows of one served model, read from its weights' directory without loading any weights."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from serving.chat import ChatTemplate
from serving.config import SloClass
from serving.detokenize import Vocabulary
from serving.engine.base import Capabilities
from serving.errors import StartError
from serving.tokenizer import Tokenizer

_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One name clients may ask for. `adapter`: a LoRA on the model `base`; None: the model itself."""

    name: str
    tokenizer: Tokenizer
    vocabulary: Vocabulary
    context_tokens: int  # prompt + generated tokens
    eos_ids: frozenset[int] = frozenset()
    chat: ChatTemplate | None = None  # None: no chat endpoint for this model
    capabilities: Capabilities = field(default_factory=Capabilities)
    created: int = field(default_factory=lambda: int(time.time()))  # unix seconds
    base: str | None = None
    adapter: str | None = None
    classes: Mapping[str, SloClass] = field(default_factory=dict)  # what `service_tier` may name

    def with_adapter(self, adapter: str) -> ServedModel:
        """The same with a LoRA, as clients ask for it: `model:adapter`. No model's name has a colon."""
        return replace(self, name=f"{self.name}:{adapter}", base=self.name, adapter=adapter)


def load_served_model(
    name: str,
    directory: Path,
    *,
    context_tokens: int | None = None,
    capabilities: Capabilities | None = None,
) -> ServedModel:
    """Read tokenizer, template and limits; raises StartError naming what is missing.

    `context_tokens`: the engine's limit, when it is below the model's own.
    """
    tokenizer = Tokenizer.from_file(directory / "tokenizer.json")
    model_limit = _read_json(directory / "config.json").get("max_position_embeddings")
    limits = [limit for limit in (context_tokens, model_limit) if limit is not None]
    if not limits:
        raise StartError(
            f"{directory / 'config.json'} has no max_position_embeddings and no limit was given"
        )
    return ServedModel(
        name=name,
        tokenizer=tokenizer,
        vocabulary=Vocabulary(tokenizer),
        context_tokens=min(limits),
        eos_ids=read_eos_ids(directory),
        chat=read_chat_template(directory),
        capabilities=capabilities or Capabilities(),
    )


def read_eos_ids(directory: Path) -> frozenset[int]:
    """Every id that ends a text: a model may have several, and either file may name them."""
    found: set[int] = set()
    for file in ("generation_config.json", "config.json"):
        ids = _read_json(directory / file).get("eos_token_id")
        if isinstance(ids, int):
            found.add(ids)
        elif isinstance(ids, list):
            found.update(ids)
    return frozenset(found)


def read_chat_template(directory: Path) -> ChatTemplate | None:
    """The template in chat_template.jinja, else in tokenizer_config.json, else None."""
    config = _read_json(directory / "tokenizer_config.json")
    file = directory / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.exists() else config.get("chat_template")
    if isinstance(source, list):  # several named templates
        source = next((entry["template"] for entry in source if entry["name"] == "default"), None)
    if source is None:
        return None
    tokens = {key: _spelling(config[key]) for key in _SPECIAL_TOKENS if config.get(key) is not None}
    return ChatTemplate(source, tokens)


def _spelling(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _read_json(path: Path) -> dict[str, Any]:
    """The object in `path`, empty when there is no such file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise StartError(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise StartError(f"{path} holds no JSON object")
    return content
