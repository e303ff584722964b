"""Penalties under speculation: each draft is penalised by its own history, and what was accepted counts."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .declare import declared, nbytes, nothing, reads
from .registry import Access, Work


class _PathTokens(NamedTuple):
    tokens: torch.Tensor
    paths: torch.Tensor

    def meta(self) -> torch.Tensor:
        b, d, depth = self.paths.shape
        return nothing(b * d, depth - 1, dtype=torch.int64)

    def cost(self) -> Work:
        return Work(nbytes(self.tokens) + 2 * nbytes(self.paths))

    def footprint(self) -> tuple[Access, ...]:
        return reads(*self)


@declared("path_tokens(Tensor tokens, Tensor paths) -> Tensor", _PathTokens, integer=True)
def path_tokens(tokens: torch.Tensor, paths: torch.Tensor) -> torch.Tensor:
    """Drafts on the way to each node, the root left out, since it is no draft: [b · d, depth - 1] int64, -1 behind
    the last. ``tokens`` [b, d], ``paths`` [b, d, depth] as ``verify.tree_paths`` has them."""
    b, d, depth = paths.shape
    drafts = paths[:, :, 1:]
    picked = tokens.gather(1, drafts.clamp(min=0).reshape(b, -1)).view(b * d, depth - 1)
    return torch.where(drafts.reshape(b * d, depth - 1) >= 0, picked, -1)


def _count(state: torch.Tensor, values: torch.Tensor, tokens: torch.Tensor, *, adds: bool) -> None:
    """Column by column, so that sums are those of tokens that came one by one."""
    if not state.shape[0]:
        return
    wide = torch.cat([state, state[:, :1]], 1)  # what is no token goes to one column more
    for column in tokens.unbind(1):
        ids = torch.where(column >= 0, column, state.shape[1]).unsqueeze(1)
        if adds:
            wide.scatter_add_(1, ids, values)
        else:
            wide.scatter_(1, ids, values)
    state.copy_(wide[:, :-1])


class _AlongPaths(NamedTuple):
    state: torch.Tensor
    values: torch.Tensor
    paths: torch.Tensor
    adds: bool

    def meta(self) -> torch.Tensor:
        return nothing(self.paths.shape[0], self.state.shape[1], dtype=self.state.dtype)

    def cost(self) -> Work:
        rows = self.paths.shape[0] * self.state.shape[1] * self.state.element_size()
        return Work(nbytes(self.state, self.values, self.paths) + rows)

    def footprint(self) -> tuple[Access, ...]:
        return reads(self.state, self.values, self.paths)


@declared("along_paths(Tensor state, Tensor values, Tensor paths, bool adds) -> Tensor", _AlongPaths)
def along_paths(state: torch.Tensor, values: torch.Tensor, paths: torch.Tensor, adds: bool) -> torch.Tensor:
    """A penalizer's ``state`` [b, vocab] as it would be at each node: [b · d, vocab]. ``values`` [b, 1] is what a
    token adds, or sets; ``paths`` [b · d, depth] int64 are the node's drafts, -1 behind the last."""
    each = paths.shape[0] // state.shape[0]
    out = state.repeat_interleave(each, 0)
    _count(out, values.repeat_interleave(each, 0), paths, adds=adds)
    return out


class _CountAccepted(NamedTuple):
    state: torch.Tensor
    values: torch.Tensor
    accepted: torch.Tensor
    adds: bool

    def meta(self) -> None:
        """Nothing is returned."""

    def cost(self) -> Work:
        return Work(nbytes(self.values) + 3 * nbytes(self.accepted))

    def footprint(self) -> tuple[Access, ...]:
        return (*reads(self.values, self.accepted), Access(self.state, write=True))


@declared("count_accepted(Tensor(a!) state, Tensor values, Tensor accepted, bool adds) -> ()", _CountAccepted)
def count_accepted(state: torch.Tensor, values: torch.Tensor, accepted: torch.Tensor, adds: bool) -> None:
    """Count the tokens ``accepted`` [b, n] int64, -1 where there is none, in ``state`` [b, vocab], in their order."""
    _count(state, values, accepted, adds=adds)
