"""The Runner on torch: computes a step plan with a transformers model over a paged pool."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from serving.config import EngineConfig
from serving.engine.sequence import Drawn, Sequence, StepPlan
from serving.engine.torch.batch import Packer
from serving.engine.torch.draw import draw
from serving.engine.torch.model import load_model
from serving.engine.torch.pool import KVPool
from serving.errors import StartError
from serving.kv.layout import KVLayout
from serving.manifest import model_digest

FEWEST_BLOCKS = 8  # below this not even one useful prompt fits


class TorchRunner:
    """See `serving.engine.sequence.Runner`. `run` may be called from any one thread at a time."""

    def __init__(self, config: EngineConfig, directory: Path, *, fused: bool = True) -> None:
        """Load the weights of `directory`, allocate `config.kv_bytes`; StartError if it cannot."""
        device = _device(config.device)
        dtype: torch.dtype = getattr(torch, config.dtype)
        torch.set_num_threads(config.threads)
        self._threads = config.threads
        self._threads_set_on = threading.get_ident()
        self._model = load_model(directory, dtype=dtype, device=device, fused=fused)
        card = self._model.card
        layout = KVLayout(
            model=model_digest(directory),
            dtype=config.dtype,
            layers=card.layers,
            kv_heads=card.kv_heads,
            head_dim=card.head_dim,
            block_tokens=config.block_tokens,
            element_bytes=dtype.itemsize,
        )
        n_blocks = config.kv_bytes // layout.block_bytes
        if n_blocks < FEWEST_BLOCKS:
            raise StartError(
                f"engine.kv_bytes = {config.kv_bytes}: room for {n_blocks} blocks "
                f"of {layout.block_bytes} bytes; "
                f"allowed: at least {FEWEST_BLOCKS * layout.block_bytes} for this model and block_tokens"
            )
        self.pool = KVPool(layout, n_blocks, dtype, device)
        self._packer = Packer(self.pool, dtype, device)
        self.memory = self.pool.memory
        self.layout = layout.fingerprint
        self.context_tokens = card.context_tokens
        self.vocab_size = self._model.vocab_size
        self.eos_token_ids = card.eos_token_ids

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Drawn:
        self._limit_threads()
        logits = self._model(self._packer.pack(plan))
        if logits is None:
            return Drawn([])
        return draw(logits, plan.drawing, self.eos_token_ids)

    def accept(self, sequence: Sequence, n_tokens: int) -> str | None:
        """Real KV carries nothing to check against; lease and generation were confirmed by the reader."""
        return None

    def _limit_threads(self) -> None:
        """OpenMP keeps the number of threads per calling thread; the engine's is not the loader's."""
        if threading.get_ident() != self._threads_set_on:
            torch.set_num_threads(self._threads)
            self._threads_set_on = threading.get_ident()


def _device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise StartError(f"engine.device = {name!r}: this process sees {count} CUDA devices")
        device = torch.device("cuda", device.index or 0)
    return device
