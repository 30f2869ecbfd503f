"""The torch engine, assembled: scheduler and thread of EngineCore around a TorchRunner."""

from __future__ import annotations

from pathlib import Path

from serving.config import EngineConfig
from serving.engine.base import Engine
from serving.engine.core import EngineCore
from serving.engine.torch.runner import TorchRunner


def build_torch_engine(config: EngineConfig, directory: Path) -> Engine:
    """An engine, not yet started, on the weights in `directory`; raises StartError, one line, if it cannot.

    Loads the weights and allocates the KV pool, which takes a second or more; sets the number of torch's
    threads for the process.
    """
    runner = TorchRunner(config, directory)
    return EngineCore(runner, config, vocab_size=runner.vocab_size)
