"""How loaded the engine is: by its own statistics where they tell, by what was sent to it where not."""

from __future__ import annotations

from collections.abc import Collection

from serving.engine.base import BlockStates, Load
from serving.engine.trtllm.live import Live, Stage
from serving.engine.trtllm.stats import Reading


def load_of(
    lives: Collection[Live], reading: Reading | None, blocks: BlockStates, *, step: int, n_drawn: int
) -> Load:
    """After `step`, in which `n_drawn` tokens were told. Statistics are a little older than that."""
    prompts = [live for live in lives if live.computes_prompt]
    moving = sum(live.stage is not Stage.COMPUTING for live in lives)
    sent_tokens = sum(len(live.work.tokens) for live in prompts)
    queued = None if reading is None else reading.queued_prompt_tokens
    computed = None if reading is None else reading.prompt_tokens
    decoded: tuple[int, int] | None = None
    if reading is not None and reading.decoding is not None:
        decodes = [live for live in lives if live.stage is Stage.COMPUTING and not live.computes_prompt]
        held = sum(len(live.work.tokens) + live.taken for live in decodes)
        decoded = (0, 0) if reading.prompt_tokens else (reading.decoding, held)
    return Load(
        step=step,
        running=len(lives) - len(prompts) - moving,
        waiting=len(prompts) + moving,
        waiting_tokens=sent_tokens if queued is None else max(queued, sent_tokens),
        batch_tokens=max(n_drawn, computed or 0),
        step_ms=0.0 if reading is None else reading.step_ms,
        runnable=is_runnable(lives),
        blocks=blocks,
        decoded=decoded,
    )


def is_runnable(lives: Collection[Live]) -> bool:
    """The engine has something to compute: KV that is on its way takes no step."""
    return any(live.stage is Stage.COMPUTING for live in lives)
