"""SGLang's dynamic chunks: as its scheduler is made, it times forwards on the first stage, and all stages fit a curve.

The times are those of the virtual GPU, and reach the other stages by the link.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from importlib import import_module
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import numpy as np

from ...run.system import SystemParts
from ...vgpu.device import CURRENT
from ..names import EngineError
from .edge import replace_attribute

# The modules that time forwards, from old to new.
_TIMING: Final = (
    "sglang.srt.managers.scheduler_pp_mixin",
    "sglang.srt.managers.scheduler_components.dynamic_chunk_sizer",
)
_TAG: Final = "chunk sizes"


def timed_virtually(parts: SystemParts) -> Sequence[str]:
    """Let SGLang time by the virtual clock, with tokens of the model's vocabulary, and hand on what it has found.
    Returns its warnings, which are there when its scheduler has been made."""
    warnings: list[str] = []
    runtime, vocabulary = CURRENT.get().runtime, parts.resolved.model.vocab_size
    drawn = np.random.default_rng(parts.resolved.scenario.measure.seed)

    def randint(low: int, high: int, **options: Any) -> Any:
        return drawn.integers(low, min(high, vocabulary), **options)

    replaced = {
        "time": _with(time, perf_counter=lambda: runtime.now / 1e9),
        "np": _with(np, random=_with(np.random, randint=randint)),
        "broadcast_pyobj": lambda data, *_, **__: _handed_on(parts, data),
    }
    for module, (name, value) in product(_TIMING, replaced.items()):
        replace_attribute(module, name, value)
    for name in (*_TIMING, "sglang.srt.managers.scheduler"):
        loaded: Any = sys.modules.get(name)
        if loaded is not None:
            loaded.logger.warning = lambda text, *_: warnings.append(text)
    stages: Any = import_module("sglang.srt.distributed.parallel_state")._PP

    def broadcast(data: list[Any], *_: Any, **__: Any) -> None:
        data[:] = _handed_on(parts, data)

    stages.broadcast_object_list = broadcast
    return warnings


def _with(module: ModuleType, **attributes: Any) -> Any:
    """The module with some attributes that are others."""
    return SimpleNamespace(**vars(module) | attributes)


def _handed_on(parts: SystemParts, data: list[Any]) -> list[Any]:
    """The first stage's data, on every stage."""
    link, stage = parts.context.link, parts.context.stage
    assert link is not None and stage is not None
    if not stage.is_first:
        received: list[Any] = link.receive(stage.preceding, _TAG).value
        data = received
    if not stage.is_last:
        link.send(stage.following, _TAG, data)
    return data


def require_curve(scheduler: Any, warnings: Sequence[str]) -> None:
    """Raises EngineError where SGLang goes on with chunks of one size."""
    sizer = getattr(scheduler, "dynamic_chunk_sizer", None)
    predictor = getattr(scheduler, "length_predictor", None) if sizer is None else sizer.predictor
    if predictor is None or not predictor.is_ready:
        raise EngineError(
            f"SGLang would go on with chunks of one size (ChunkSizePredictor.fit): {'; '.join(warnings)}"
        )
