"""The steps that a batch is announced as."""

from __future__ import annotations

from collections.abc import Sequence

from ..batch import ForwardMode, ScheduleBatch
from ..config import SpeculativeConfig
from ..observe import StepInfo, StepKind
from ..speculate.steps import draft_step, extend_step

_KINDS: dict[ForwardMode, StepKind] = {
    ForwardMode.EXTEND: "prefill",
    ForwardMode.MIXED: "mixed",
    ForwardMode.DECODE: "decode",
    ForwardMode.IDLE: "idle",
}


def step_infos(batch: ScheduleBatch, spec: SpeculativeConfig | None, *, steady: bool) -> Sequence[StepInfo]:
    """One step, or under speculation several in the order of their forwards."""
    size, tokens = batch.batch_size, batch.num_tokens
    if spec is None or batch.forward_mode.is_idle:
        return [StepInfo(batch.step, _KINDS[batch.forward_mode], size, tokens, steady)]
    extend = extend_step(batch.step)
    if batch.forward_mode.is_extend:
        prompt = StepInfo(batch.step, "prefill", size, tokens, steady)
        return [prompt, StepInfo(extend, "draft_extend", size, tokens, steady)]
    tokens = size * spec.draft_tokens
    return [
        StepInfo(draft_step(batch.step), "draft", size, size, steady),
        StepInfo(batch.step, "verify", size, tokens, steady),
        StepInfo(extend, "draft_extend", size, tokens, steady),
    ]
