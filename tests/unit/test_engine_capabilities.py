"""What frontends are told of an engine is what the engine says of itself: of one that seems unable to hand
over what it decodes every stream stays until it ends, however long a drain waits."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving.config import EngineConfig, SimProfile, Variant
from serving.engine.factory import build_engine, engine_capabilities
from tests.tiny_tokenizer import save_tiny_tokenizer, tiny_tokenizer
from tests.unit.tiny_models import save_tiny_model

CONFIGS = [
    EngineConfig(kind="torch", dtype="float32", kv_bytes=1 << 20),
    EngineConfig(kind="sim", profile=SimProfile(), kv_bytes=1 << 20),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_frontends_know_what_the_engine_can_do(tmp_path: Path, config: EngineConfig) -> None:
    directory = save_tiny_model(tmp_path / "model", "llama", vocab_size=tiny_tokenizer().vocab_size)
    save_tiny_tokenizer(directory)
    variant = Variant(weights=str(directory), engine=config)
    told = engine_capabilities(variant)
    assert told == build_engine(variant).capabilities
    assert told.migrate_kv
