"""What both workers are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from ..batch import DraftInput, ForwardBatch, ModelOutput, ScheduleBatch
from ..config import SpeculativeConfig
from ..kernels.drafts import pick_bonus
from ..model.sampling_info import SamplingInfo
from ..observe import Observer
from .acceptance import Acceptance
from .drafter import Extended, Tree, extend_batch
from .verifier import DraftVerdict

if TYPE_CHECKING:
    from ..memory.cache import PrefixCache
    from ..memory.kv import KVPool


class Drafts(Protocol):
    """The draft model, as ``Drafter`` runs it."""

    def chain(self, start: DraftInput, rows: torch.Tensor, seq_lens: torch.Tensor, longest: int) -> Tree: ...

    def tree(self, start: DraftInput, rows: torch.Tensor, seq_lens: torch.Tensor, longest: int) -> Tree: ...

    def extend(self, batch: ForwardBatch, hidden_states: torch.Tensor) -> Extended: ...

    def extend_chain(
        self,
        predict: torch.Tensor,
        hidden_states: torch.Tensor,
        accept_lens: torch.Tensor,
        rows: torch.Tensor,
        ends: torch.Tensor,
        lens: tuple[torch.Tensor, torch.Tensor],
        longest: int,
    ) -> Extended: ...


class Verifies(Protocol):
    """The target's verdict, as ``Verifier`` gives it."""

    def forward(
        self, tree: Tree, rows: torch.Tensor, seq_lens: torch.Tensor, slots: torch.Tensor | None, longest: int
    ) -> ModelOutput: ...

    def predict(
        self, tree: Tree, output: ModelOutput, info: SamplingInfo, seq_lens: torch.Tensor
    ) -> DraftVerdict: ...


@dataclass(frozen=True, slots=True)
class Worker:
    spec: SpeculativeConfig
    drafter: Drafts
    verifier: Verifies
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
        lens: tuple[torch.Tensor, torch.Tensor],
    ) -> DraftInput:
        """Teach the draft a prompt that the target has just run: ``rotated`` [T] are its tokens from the second on,
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
        return DraftInput(next_ids, *self.drafter.extend(prompt, output.hidden_states))

    @staticmethod
    def bonus(predict: torch.Tensor, accept_lens: torch.Tensor) -> torch.Tensor:
        """[b] int64: the last token that was accepted, of ``predict`` [b · d]."""
        last: torch.Tensor = pick_bonus(predict, accept_lens)
        return last


def count_accepted(info: SamplingInfo, predict: torch.Tensor, index: torch.Tensor) -> None:
    """Let exact penalties know the tokens ``predict`` [b · d] at the places ``index`` [b, most]."""
    orchestrator = info.penalizer_orchestrator
    if orchestrator is None or not orchestrator.is_required or not orchestrator.exact:
        return
    tokens = predict[index.clamp(min=0).to(torch.int64)]
    orchestrator.count_accepted(torch.where(index >= 0, tokens, -1))
