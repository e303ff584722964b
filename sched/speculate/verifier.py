"""Verifying drafts: one forward of the target over all of them, and the target's next token behind each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ..batch import ForwardBatch, ForwardMode, ModelOutput
from ..config import EngineConfig
from ..kernels.history import path_tokens
from ..kernels.verify import tree_links, tree_paths
from ..model.decoder import Model
from ..model.grammar import GrammarError, GrammarState, vocab_mask_words
from ..model.runner import GraphedFunction, GraphInput, graph_sizes
from ..model.sampler import TokenSampler
from ..model.sampling_info import SamplingInfo
from .drafter import ChainPlaces, DraftRows, Tree, chain_batch


class DraftVerdict(NamedTuple):
    """The target's results for all drafts of a batch, the roots included: [b · d] each."""

    predict: torch.Tensor  # int64, the target's next token behind each
    hidden_states: torch.Tensor  # [b · d, hidden]
    logprobs: torch.Tensor | None  # float32, of ``predict``


class Verifier:
    """``pages`` is the page table that forwards read."""

    def __init__(
        self, model: Model, sampler: TokenSampler, config: EngineConfig, *, pages: torch.Tensor
    ) -> None:
        assert config.speculative is not None
        self._spec = config.speculative
        self._device = config.device
        self._model = model
        self._sampler = sampler
        self._pages = pages
        d = self._spec.draft_tokens
        most = max(config.max_running_requests, *graph_sizes(config))  # a graph may be padded beyond
        self._lens = torch.full((most,), d, dtype=torch.int32, device=config.device)
        one = GraphInput((), torch.int64)
        self._chain = GraphedFunction(
            self._run_chain, [GraphInput((d,), torch.int64), one, one], config, longest=pages.shape[1]
        )

    def forward(self, tree: Tree, at: DraftRows, slots: torch.Tensor | None) -> ModelOutput:
        """Logits [b · d, vocab] and hidden states of every draft. KV of a tree goes to ``slots`` [b · d], that of a
        chain behind the rows' lengths."""
        if tree.parents is None:
            logits, hidden = self._chain(tree.tokens, at.rows, at.seq_lens, max_seq_len=at.longest)
            return ModelOutput(logits, hidden_states=hidden)
        assert slots is not None
        return self._model.forward(self._tree_batch(tree.tokens, tree.parents, at, slots))

    def _run_chain(
        self, tokens: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, max_seq_len: int
    ) -> Sequence[torch.Tensor]:
        b, d = tokens.shape
        places = ChainPlaces(self._pages, rows, seq_lens, seq_lens + d)
        batch = chain_batch(ForwardMode.TARGET_VERIFY, tokens, places, self._lens[:b], max_seq_len)
        output = self._model.forward(batch)
        assert output.hidden_states is not None
        return [output.logits, output.hidden_states]

    def _tree_batch(
        self, tokens: torch.Tensor, parents: torch.Tensor, at: DraftRows, slots: torch.Tensor
    ) -> ForwardBatch:
        """Every node as a request of its own, whose last positions are its ancestors."""
        b, d = tokens.shape
        depth = self._spec.most_accepted
        paths, counts = tree_paths(parents, depth)
        branches = slots.view(b, d).gather(1, paths.clamp(min=0).view(b, d * depth)).view(b * d, depth)
        lens = (at.seq_lens.unsqueeze(1) + counts).view(-1)
        return ForwardBatch(
            mode=ForwardMode.TARGET_VERIFY,
            batch_size=b * d,
            num_tokens=b * d,
            input_ids=tokens.view(-1),
            positions=lens - 1,
            req_pool_indices=at.rows.repeat_interleave(d),
            seq_lens=lens,
            out_cache_loc=slots,
            max_seq_len=at.longest,
            capture_hidden=True,
            branches=branches,
            branch_lens=counts.view(-1),
        )

    def predict(
        self, tree: Tree, output: ModelOutput, info: SamplingInfo, seq_lens: torch.Tensor
    ) -> DraftVerdict:
        """The token that the target samples behind each draft, as it would if the drafts before it were its own."""
        b, d = tree.tokens.shape
        parents = tree.parents
        if parents is None:
            parents = (torch.arange(d, device=self._device) - 1).expand(b, d)
        paths, counts = tree_paths(parents, self._spec.most_accepted)
        orchestrator = info.penalizer_orchestrator
        own = None
        if orchestrator is not None and orchestrator.is_required and orchestrator.exact:
            own = path_tokens(tree.tokens, paths)
        mask = draft_mask(tree.tokens, parents, info) if info.needs.grammar else None
        drafts = info.for_drafts(d, own, mask)
        places = (seq_lens.unsqueeze(1) + counts).view(-1)
        predict = self._sampler.sample(output, drafts, places)
        logprobs = None
        if info.needs.logprobs:
            logprobs = self._sampler.score(output, drafts, places, predict).logprobs
        assert output.hidden_states is not None
        return DraftVerdict(predict, output.hidden_states, logprobs)


# ---- the tokens that a grammar allows behind each draft ------------------------------------------------------


class _Links(NamedTuple):
    """One request's tree on the host."""

    first_child: Sequence[int]
    next_sibling: Sequence[int]
    tokens: Sequence[int]

    def children(self, node: int) -> Iterator[int]:
        child = self.first_child[node]
        while child >= 0:
            yield child
            child = self.next_sibling[child]


def draft_mask(tokens: torch.Tensor, parents: torch.Tensor, info: SamplingInfo) -> torch.Tensor:
    """[b · d, ceil(vocab / 32)] int32 of the trees ``tokens`` [b, d]. The trees come to the host by three blocking
    copies (upstream's too), the mask goes to the device by one."""
    first_child, next_sibling = tree_links(parents)
    children = first_child.cpu()
    siblings = next_sibling.cpu()
    drafts = tokens.cpu()
    b, d = tokens.shape
    pinned = info.config.capabilities.pinned_memory
    shape = (b * d, vocab_mask_words(info.config.vocab_size))
    mask = torch.full(shape, -1, dtype=torch.int32, pin_memory=pinned)
    for i, grammar in enumerate(info.grammars):
        if grammar is not None:
            links = _Links(children[i].tolist(), siblings[i].tolist(), drafts[i].tolist())
            _fill(mask[i * d : (i + 1) * d], links, grammar, node=0)
    return mask.to(info.config.device, non_blocking=pinned)


def _fill(mask: torch.Tensor, links: _Links, grammar: GrammarState, *, node: int) -> None:
    """Fill the rows of ``node``, whose allowed tokens ``grammar`` gives, and of its descendants. A draft that the
    grammar rejects, and all behind it, stay unmasked: no accepted path reaches them."""
    grammar.fill_vocab_mask(mask[node].numpy())
    for child in links.children(node):
        ahead = grammar.copy()
        try:
            ahead.accept_token(links.tokens[child])
        except GrammarError:
            continue
        _fill(mask, links, ahead, node=child)
