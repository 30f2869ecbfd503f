"""The whole application in one process over TensorRT-LLM engines of the fake package: see app_rig."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from serving.config import AppConfig, Variant, load_config
from serving.control_host import ControlHost
from serving.engine.factory import engine_capabilities
from serving.engine.trtllm.build import build_trtllm_engine
from serving.engine.trtllm.engine import TrtllmEngine
from serving.frontend_host import FrontendHost
from serving.kv.elsewhere import MovedElsewhere
from serving.kv.local import Switchboard
from serving.link import Identity
from tests.fake_trtllm.machine import Machine
from tests.fake_trtllm.package import installed
from tests.tiny_tokenizer import tiny_model
from tests.unit.app_rig import BLOCK_TOKENS, CONTEXT_TOKENS, PLAIN, App, SimWorker
from tests.unit.trtllm_rig import save_model


class TrtllmWorker(SimWorker):
    """One worker process; `machine` is the fake inside its engine."""

    engine: TrtllmEngine  # type: ignore[assignment]

    def _make(self, app: TrtllmApp) -> None:  # type: ignore[override]
        spec: Variant = app.config.models[0].variants[0]
        with installed(app.profile):
            self.engine = build_trtllm_engine(spec.engine, app.checkpoint, spec.parallel, self.role)
        self.machine: Machine = self.engine._llm.machine
        self.machine.knobs.step_s = app.step_ms / 1e3
        self.transfer = MovedElsewhere(self.me.ident)  # type: ignore[assignment]

    @property
    def is_free(self) -> bool:
        engine = self.engine
        held = engine._live or engine._abandoned or engine._lent or self.machine.held_blocks
        return not held and not self.host.busy

    async def kill(self, frozen: bool) -> None:
        """As SimWorker's; its engine goes with it unless `frozen`."""
        await super().kill(frozen)
        if not frozen:
            self.machine.knobs.hang = True


class TrtllmApp(App):
    """`profile`: which version the fake is. `trtllm`: settings of that section."""

    def __init__(
        self,
        *,
        version: str = "main",
        prefill: int = 1,
        decode: int = 1,
        frontends: int = 1,
        step_ms: float = 0.0,
        trtllm: dict[str, Any] | None = None,
        fake: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        settings.setdefault("router", {"local_prefill": False})
        self.profile = version
        self.step_ms = step_ms
        self._directory = tempfile.TemporaryDirectory()
        self.config = config(trtllm or {}, **settings)
        variant = self.config.models[0].variants[0]
        self.model = tiny_model(context_tokens=CONTEXT_TOKENS, capabilities=engine_capabilities(variant))
        (end,) = self.model.eos_ids
        self.checkpoint = save_model(
            Path(self._directory.name), eos=end, token_ids=PLAIN, context=CONTEXT_TOKENS, **(fake or {})
        )
        self.key = os.urandom(32)
        self.board = Switchboard()
        self.nixl = False
        self.control = ControlHost(me=Identity.fresh("control", "control"), key=self.key)
        self.workers = [TrtllmWorker(self, "prefill", n) for n in range(prefill)]
        self.workers += [TrtllmWorker(self, "decode", n) for n in range(decode)]
        self.dead = []
        adapters = [self.model.with_adapter(name) for name in variant.engine.trtllm.lora]
        served = {model.name: model for model in (self.model, *adapters)}
        self.frontends = [
            FrontendHost(
                config=self.config,
                me=Identity.fresh("frontend", f"frontend-{n}"),
                key=self.key,
                served=served,
            )
            for n in range(frontends)
        ]

    async def __aenter__(self) -> TrtllmApp:
        await super().__aenter__()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            await super().__aexit__(kind, error, trace)
        finally:
            for worker in self.workers + self.dead:
                assert isinstance(worker, TrtllmWorker)
                worker.machine.stop()
            self._directory.cleanup()

    @property
    def engines(self) -> list[TrtllmEngine]:
        return [worker.engine for worker in self.workers if isinstance(worker, TrtllmWorker)]

    def machine(self, role: str, number: int = 0) -> Machine:
        worker = self.pool(role)[number]
        assert isinstance(worker, TrtllmWorker)
        return worker.machine


def config(trtllm: dict[str, Any], **settings: Any) -> AppConfig:
    engine = {
        "kind": "tensorrt_llm",
        "block_tokens": BLOCK_TOKENS,
        "trtllm": {"transfer_timeout_ms": 5000, **trtllm},
    }
    pool = {"gpus": 1}
    variant = {"name": "main", "weights": "none", "engine": engine, "prefill": pool, "decode": pool}
    return load_config({"models": [{"name": "tiny", "variants": [variant]}], **settings})
