"""Running the draft model: chains, trees, and the extend over the tokens that the target has accepted.

At position p the draft's input is token p + 1 and the target's hidden state of p; its output predicts token p + 2::

    positions       L-1        L          L+1
    input           bonus      1st draft  2nd draft      L tokens have KV, the bonus is token L
    output          1st draft  2nd draft  3rd draft
                    |-extend-|-- drafting ----------
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..batch import DraftInput, DraftState, ExtendLens, ForwardBatch, ForwardMode
from ..config import EngineConfig, SpeculativeConfig
from ..kernels.drafts import draft_places, draft_topk, pick_accepted
from ..kernels.rows import last_tokens
from ..kernels.verify import NONE, build_tree
from ..model.draft import EagleDraft
from ..model.runner import GraphedFunction, GraphInput


class Tree(NamedTuple):
    """Drafts of a batch; the root is the bonus token. ``parents`` is None for a chain."""

    tokens: torch.Tensor  # [b, d] int64
    parents: torch.Tensor | None  # [b, d] int64


class DraftRows(NamedTuple):
    """Where a batch is drafted for and verified. KV of the drafts goes behind each row's length."""

    rows: torch.Tensor  # [b] int64, of the page table
    seq_lens: torch.Tensor  # [b] int64, without the bonus
    longest: int  # host bound on the positions that the step touches


class VerifiedChains(NamedTuple):
    """All d verified positions of each request, of which ``accept_lens`` count."""

    predict: torch.Tensor  # [b · d] int64, the target's next token behind each position
    hidden_states: torch.Tensor  # [b · d, hidden], the target's
    accept_lens: torch.Tensor  # [b] int32
    at: DraftRows  # its lengths are those behind the positions
    lens: ExtendLens


class DraftCandidates(NamedTuple):
    """The candidate nodes of one level of a draft tree: [b, n] each."""

    scores: torch.Tensor
    tokens: torch.Tensor
    parents: torch.Tensor


class _Frontier(NamedTuple):
    """The branches of a draft tree that are continued: [b, topk] each, and their states."""

    scores: torch.Tensor
    tokens: torch.Tensor
    places: torch.Tensor  # among the candidates
    hidden: torch.Tensor  # [b, topk, hidden]
    slots: torch.Tensor  # [b, topk, depth so far]


class Drafter:
    """``pages`` is the page table that forwards read."""

    def __init__(
        self, draft: EagleDraft, config: EngineConfig, *, pages: torch.Tensor, hidden: GraphInput
    ) -> None:
        assert config.speculative is not None
        self._spec: SpeculativeConfig = config.speculative
        self._draft = draft
        self._pages = pages
        d, longest = self._spec.draft_tokens, pages.shape[1]
        one = GraphInput((), torch.int64)
        self._chain = GraphedFunction(
            self._run_chain, [GraphInput((1,), torch.int64), hidden, one, one], config, longest=longest
        )
        length = GraphInput((), torch.int32)
        each = GraphInput((d, *hidden.shape), hidden.dtype)
        self._extend_chain = GraphedFunction(
            self._run_extend_chain,
            [GraphInput((d,), torch.int64), each, one, one, one, length, length],
            config,
            longest=longest,
        )

    # ---- drafting ------------------------------------------------------------------------------------------

    def draft(self, start: DraftInput, at: DraftRows) -> Tree:
        """A chain of ``steps`` drafts behind each bonus where ``topk`` is 1, else a tree."""
        if self._spec.topk > 1:
            return self._draft_tree(start, at)
        state = start.state
        [tokens] = self._chain(
            state.topk_index, state.hidden_states, at.rows, at.seq_lens, max_seq_len=at.longest
        )
        return Tree(torch.cat([start.bonus_tokens.unsqueeze(1), tokens], 1), None)

    def _run_chain(
        self,
        topk_index: torch.Tensor,
        hidden: torch.Tensor,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        max_seq_len: int,
    ) -> Sequence[torch.Tensor]:
        tokens = [topk_index[:, 0]]
        for step in range(self._spec.steps - 1):
            batch = self._tokens(tokens[-1], rows, seq_lens + step, max_seq_len)
            hidden = self._draft.forward(batch, hidden)
            tokens.append(draft_topk(self._draft.logits(hidden), 1)[1][:, 0])
        return [torch.stack(tokens, 1)]

    def _tokens(
        self, tokens: torch.Tensor, rows: torch.Tensor, places: torch.Tensor, max_seq_len: int
    ) -> ForwardBatch:
        """The batch of one token for each row, at position ``places``."""
        positions, slots = draft_places(self._pages, rows, places, 1)
        return ForwardBatch(
            mode=ForwardMode.DRAFT,
            input_ids=tokens,
            positions=positions,
            req_pool_indices=rows,
            seq_lens=places + 1,
            out_cache_loc=slots,
            max_seq_len=max_seq_len,
        )

    def _draft_tree(self, start: DraftInput, at: DraftRows) -> Tree:
        """``topk`` branches of ``steps`` drafts, and the best ``draft_tokens`` of all their candidates. Branch r's KV
        goes to the row's slots from ``seq_lens + r · steps`` on."""
        b, k = at.seq_lens.shape[0], self._spec.topk
        _, flat = draft_places(self._pages, at.rows, at.seq_lens, self._spec.drafts)
        slots = flat.view(b, k, self._spec.steps)
        state = start.state
        front = _Frontier(
            state.topk_p,
            state.topk_index,
            torch.arange(k, device=at.seq_lens.device).expand(b, k),
            state.hidden_states.unsqueeze(1).expand(b, k, -1),
            slots[:, :, :0],
        )
        levels = [DraftCandidates(front.scores, front.tokens, torch.full_like(front.tokens, NONE))]
        for step in range(self._spec.steps - 1):
            front = front._replace(slots=torch.cat([front.slots, slots[:, :, step : step + 1]], 2))
            hidden, level = self._grow(front, at)
            first = k + step * k * k
            levels.append(level)
            front = _best(front, level, hidden, first=first)
        scores, tokens, parents = (torch.cat(parts, 1) for parts in zip(*levels, strict=True))
        return Tree(*build_tree(scores, tokens, parents, start.bonus_tokens, self._spec.draft_tokens))

    def _grow(self, front: _Frontier, at: DraftRows) -> tuple[torch.Tensor, DraftCandidates]:
        """Hidden states [b, k, hidden] of the frontier, and the k · k candidates behind it."""
        (b, k), depth = front.tokens.shape, front.slots.shape[2]
        rows, seq_lens = at.rows, at.seq_lens
        batch = ForwardBatch(
            mode=ForwardMode.DRAFT,
            input_ids=front.tokens.reshape(-1),
            positions=(seq_lens + depth - 1).repeat_interleave(k),
            req_pool_indices=rows.repeat_interleave(k),
            seq_lens=(seq_lens + depth).repeat_interleave(k),
            out_cache_loc=front.slots[:, :, -1].reshape(-1),
            max_seq_len=at.longest,
            branches=front.slots.reshape(b * k, depth),
            branch_lens=torch.full((b * k,), depth, dtype=torch.int64, device=rows.device),
        )
        hidden = self._draft.forward(batch, front.hidden.reshape(b * k, -1))
        topk_p, topk_index = draft_topk(self._draft.logits(hidden), k)
        scores = front.scores.unsqueeze(2) * topk_p.view(b, k, k)
        parents = front.places.repeat_interleave(k, 1)
        return hidden.view(b, k, -1), DraftCandidates(scores.view(b, -1), topk_index.view(b, -1), parents)

    # ---- extending -----------------------------------------------------------------------------------------

    def extend(self, batch: ForwardBatch, hidden_states: torch.Tensor) -> DraftState:
        """Run the draft over tokens [T] that the target has accepted, ``batch.extend_lens`` of each request, with the
        target's hidden states [T, hidden]."""
        hidden = self._draft.forward(batch, hidden_states)
        return self._state(last_tokens(hidden, batch.extend_lens))

    def _state(self, hidden: torch.Tensor) -> DraftState:
        topk_p, topk_index = draft_topk(self._draft.logits(hidden), self._spec.topk)
        return DraftState(topk_p, topk_index, hidden)

    def extend_chains(self, chains: VerifiedChains) -> DraftState:
        """Run the draft over all verified positions. The state is that of each request's last accepted token."""
        predict, hidden_states, accept_lens, at, lens = chains
        b = accept_lens.shape[0]
        inputs = (predict.view(b, -1), hidden_states.view(b, predict.shape[0] // b, -1))
        return DraftState(
            *self._extend_chain(
                *inputs, accept_lens.to(torch.int64), at.rows, at.seq_lens, *lens, max_seq_len=at.longest
            )
        )

    def _run_extend_chain(
        self,
        predict: torch.Tensor,
        hidden_states: torch.Tensor,
        accept_lens: torch.Tensor,
        rows: torch.Tensor,
        ends: torch.Tensor,
        extend_lens: torch.Tensor,
        prefix_lens: torch.Tensor,
        max_seq_len: int,
    ) -> Sequence[torch.Tensor]:
        batch = chain_batch(
            ForwardMode.DRAFT_EXTEND,
            predict,
            DraftRows(rows, ends, max_seq_len),
            pages=self._pages,
            starts=prefix_lens.to(torch.int64),
            extend_lens=extend_lens,
        )
        hidden = self._draft.forward(batch, hidden_states.reshape(batch.num_tokens, -1))
        return self._state(pick_accepted(hidden, accept_lens))


def chain_batch(
    mode: ForwardMode,
    tokens: torch.Tensor,
    at: DraftRows,
    *,
    pages: torch.Tensor,
    starts: torch.Tensor,
    extend_lens: torch.Tensor,
) -> ForwardBatch:
    """All of ``tokens`` [b, d], each behind the one before it, from position ``starts`` [b] on up to the lengths of
    ``at``; ``extend_lens`` [b] int32 are all d."""
    d = tokens.shape[1]
    positions, slots = draft_places(pages, at.rows, starts, d)
    return ForwardBatch(
        mode=mode,
        input_ids=tokens.view(-1),
        positions=positions,
        req_pool_indices=at.rows,
        seq_lens=at.seq_lens,
        out_cache_loc=slots,
        max_seq_len=at.longest,
        extend_lens=extend_lens,
        max_extend_len=d,
        capture_hidden=mode is ForwardMode.TARGET_VERIFY,
    )


def _best(front: _Frontier, level: DraftCandidates, hidden: torch.Tensor, *, first: int) -> _Frontier:
    """The frontier of the topk best candidates of a level, which are numbered from ``first`` on."""
    k = front.tokens.shape[1]
    best = level.scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
    branch = (best // k).unsqueeze(2)
    return _Frontier(
        level.scores.gather(1, best),
        level.tokens.gather(1, best),
        best + first,
        hidden.gather(1, branch.expand(-1, -1, hidden.shape[2])),
        front.slots.gather(1, branch.expand(-1, -1, front.slots.shape[2])),
    )
