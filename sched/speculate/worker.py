"""The parts that both speculative workers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ..batch import DraftInput, DraftState, ExtendLens, ForwardBatch, ModelOutput, ScheduleBatch
from ..config import SpeculativeConfig
from ..memory.cache import PrefixCache
from ..memory.pools import KVPool
from ..model.sampling_info import SamplingInfo
from ..observe import Observer
from .acceptance import Acceptance
from .drafter import DraftRows, Tree, VerifiedChains, extend_batch
from .verifier import DraftVerdict


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
    cache: PrefixCache
    observer: Observer
    kv: KVPool | None = None  # the draft's own, where it has a model

    def prefill(
        self,
        batch: ScheduleBatch,
        forward: ForwardBatch,
        output: ModelOutput,
        rotated: torch.Tensor,
        next_ids: torch.Tensor,
        lens: ExtendLens,
    ) -> DraftInput:
        """Run the draft over a prompt that the target has just run: ``rotated`` [T] are its tokens from the second on,
        with the sampled ``next_ids`` [b] behind them; ``lens`` as for ``extend_batch``."""
        self.acceptance.begin(forward.req_pool_indices, batch.reqs)
        prompt = extend_batch(
            rotated,
            forward.req_pool_indices,
            forward.seq_lens,
            forward.out_cache_loc,
            lens,
            longest=forward.max_seq_len,
            most=forward.max_extend_len,
        )
        assert output.hidden_states is not None
        return DraftInput(next_ids, self.drafter.extend(prompt, output.hidden_states))


def count_accepted(info: SamplingInfo, predict: torch.Tensor, index: torch.Tensor) -> None:
    """Count the tokens ``predict`` [b · d] at the places ``index`` [b, most] in exact penalties."""
    orchestrator = info.penalizer_orchestrator
    if orchestrator is None or not orchestrator.is_required or not orchestrator.exact:
        return
    tokens = predict[index.clamp(min=0).to(torch.int64)]
    orchestrator.count_accepted(torch.where(index >= 0, tokens, -1))
