"""What a step of speculation is run by: a drafter, a verifier, and the rule of acceptance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ..batch import DraftInput, DraftState, ForwardBatch, ModelOutput
from ..config import SpeculativeConfig
from ..memory.pools import KVPool
from ..model.sampling import SamplingInfo
from .drafter import DraftRows, Tree, VerifiedChains
from .verifier import Acceptance, DraftVerdict


class DraftRunner(Protocol):
    """Runs the draft model (``Drafter``)."""

    def draft(self, start: DraftInput, at: DraftRows) -> Tree: ...

    def extend(self, batch: ForwardBatch, hidden_states: torch.Tensor) -> DraftState: ...

    def extend_chains(self, chains: VerifiedChains) -> DraftState: ...


class VerifyRunner(Protocol):
    """Runs the target model over drafts (``Verifier``)."""

    def forward(self, tree: Tree, at: DraftRows, slots: torch.Tensor | None) -> ModelOutput: ...

    def predict(
        self, tree: Tree, output: ModelOutput, info: SamplingInfo, seq_lens: torch.Tensor
    ) -> DraftVerdict: ...


@dataclass(frozen=True, slots=True)
class Worker:
    spec: SpeculativeConfig
    drafter: DraftRunner
    verifier: VerifyRunner
    acceptance: Acceptance
    kv: KVPool | None = None  # the draft's own, where it has a model
