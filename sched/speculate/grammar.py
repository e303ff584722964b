"""Which tokens a grammar allows behind each draft."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ..kernels.verify import tree_links
from ..model.grammar import GrammarError, GrammarState, vocab_mask_words
from ..model.sampling_info import SamplingInfo


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
