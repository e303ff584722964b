"""The model of an engine's run: schedbench's decoder on the engine's page table.

With values real it computes the scenario's model, so that greedy tokens are those of schedbench's own scheduler. With
values none it makes the same launches, and tokens follow from tags in the KV slots (``sched.model.tags``).
"""

from __future__ import annotations

import torch

from ...sched.batch import ForwardBatch, ModelOutput
from ...sched.model.runner import ModelRunner
from ...sched.model.tags import TagPool
from ..run.compose import engine_config
from ..run.compose_model import model_parts
from ..run.rank_context import ALONE
from ..run.system import SystemParts


class EngineModel:
    """``req_to_token`` is the engine's page table, [rows, context] int32: KV slots are numbered as the engine numbers
    them, from 1 (or the page size) on. Decodes replay a graph where the scenario has ``engine.cuda_graph``; the graphs
    are captured on the current stream."""

    def __init__(self, parts: SystemParts, req_to_token: torch.Tensor) -> None:
        self.config = engine_config(parts.resolved, parts.machine)
        made = model_parts(parts.resolved, self.config, req_to_token, ALONE)
        self.tags: TagPool | None = made.tags
        self._runner = ModelRunner(made.decoder, self.config)

    def forward(self, batch: ForwardBatch) -> ModelOutput:
        return self._runner.forward(batch)
