"""Verifying drafts: one forward of the target over all of them, the target's next token behind each, and how many
drafts are accepted, by the target's tokens or simulated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ..batch import ForwardBatch, ForwardMode, ModelOutput
from ..config import EngineConfig, SimulatedAcceptance
from ..kernels.sampling import row_seed
from ..kernels.verify import (
    accept_drafts,
    accept_simulated,
    path_tokens,
    simulated_lengths,
    tree_links,
    tree_paths,
)
from ..model.decoder import Model
from ..model.grammar import GrammarError, GrammarState, vocab_mask_words
from ..model.runner import GraphedFunction, GraphInput, graph_sizes
from ..model.sampling import Sampler, SamplingInfo
from ..request import Request
from .drafter import DraftRows, Tree, chain_batch


class Accepted(NamedTuple):
    places: torch.Tensor  # [b, most] int32, places among the b · d drafts, -1 behind the last
    lens: torch.Tensor  # [b] int32, how many


class TargetAcceptance:
    """Accepts the drafts that equal the target's tokens."""

    def __init__(self, most: int) -> None:
        self._most = most

    def begin(self, rows: torch.Tensor, reqs: Sequence[Request]) -> None:
        """Called when the requests in ``rows`` [b] have been prefilled."""

    def judge(self, tree: Tree, predict: torch.Tensor, rows: torch.Tensor, info: SamplingInfo) -> Accepted:  # noqa: ARG002
        """``predict`` [b · d] int64 is the target's next token behind each draft."""
        return Accepted(*accept_drafts(tree.tokens, tree.parents, predict, self._most))


class AcceptanceSimulator:
    """Draws the number of accepted drafts and overwrites the target's predictions: the tokens have no meaning."""

    def __init__(self, how: SimulatedAcceptance, config: EngineConfig, most: int) -> None:
        self._how = how
        self._most = most
        self._config = config
        self._counters = torch.zeros(config.max_running_requests + 1, dtype=torch.int64, device=config.device)
        self._verifies = 0

    def begin(self, rows: torch.Tensor, reqs: Sequence[Request]) -> None:
        """Let a request that was retracted continue its own sequence of draws."""
        had = [req.verify_ct for req in reqs]
        if any(had):
            pinned = self._config.capabilities.pinned_memory
            counts = torch.tensor(had, dtype=torch.int64, pin_memory=pinned)
            self._counters[rows] = counts.to(self._config.device, non_blocking=True)
        else:
            self._counters.index_fill_(0, rows, 0)

    def judge(self, tree: Tree, predict: torch.Tensor, rows: torch.Tensor, info: SamplingInfo) -> Accepted:  # noqa: ARG002
        how = self._how
        rounded = how.method == "multinomial"
        seeds = info.tensors.sampling_seeds
        fixed = 0
        if how.per == "batch":  # one draw, keyed by the run's seed and the number of its verifies
            key = torch.tensor([row_seed(self._config.seed, 0)]), torch.tensor([self._verifies])
            self._verifies += 1
            drawn = simulated_lengths(*key, how.mean, rounded=rounded)
            fixed = int(drawn.clamp(1, self._most))
        return Accepted(
            *accept_simulated(self._counters, rows, seeds, predict, self._most, how.mean, rounded, fixed)
        )


Acceptance = TargetAcceptance | AcceptanceSimulator


def acceptance(config: EngineConfig) -> Acceptance:
    assert config.speculative is not None
    how, most = config.speculative.acceptance, config.speculative.most_accepted
    return TargetAcceptance(most) if how is None else AcceptanceSimulator(how, config, most)


class DraftVerdict(NamedTuple):
    """The target's results for all drafts of a batch, the roots included: [b · d] each."""

    predict: torch.Tensor  # int64, the target's next token behind each
    hidden_states: torch.Tensor  # [b · d, hidden]
    logprobs: torch.Tensor | None  # float32, of ``predict``


class Verifier:
    """``pages`` is the page table that forwards read."""

    def __init__(self, model: Model, sampler: Sampler, config: EngineConfig, *, pages: torch.Tensor) -> None:
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
        # Every node is a request of its own, whose last positions are its ancestors.
        b, d = tree.tokens.shape
        depth = self._spec.most_accepted
        paths, counts = tree_paths(tree.parents, depth)
        branches = slots.view(b, d).gather(1, paths.clamp(min=0).view(b, d * depth)).view(b * d, depth)
        lens = (at.seq_lens.unsqueeze(1) + counts).view(-1)
        batch = ForwardBatch(
            mode=ForwardMode.TARGET_VERIFY,
            input_ids=tree.tokens.view(-1),
            positions=lens - 1,
            req_pool_indices=at.rows.repeat_interleave(d),
            seq_lens=lens,
            out_cache_loc=slots,
            max_seq_len=at.longest,
            capture_hidden=True,
            branches=branches,
            branch_lens=counts.view(-1),
        )
        return self._model.forward(batch)

    def _run_chain(
        self, tokens: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, max_seq_len: int
    ) -> Sequence[torch.Tensor]:
        b, d = tokens.shape
        at, lens = DraftRows(rows, seq_lens + d, max_seq_len), self._lens[:b]
        verify = ForwardMode.TARGET_VERIFY
        batch = chain_batch(verify, tokens, at, pages=self._pages, starts=seq_lens, extend_lens=lens)
        output = self._model.forward(batch)
        assert output.hidden_states is not None
        return [output.logits, output.hidden_states]

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
