"""Penalties under speculation: each draft token is penalised by its own path, and accepted tokens are counted."""

from __future__ import annotations

import torch
from torch import Tensor

from .declare import kernel, meta_tensor, nbytes
from .registry import Work


def _path_meta(paths: Tensor) -> Tensor:
    b, d, depth = paths.shape
    return meta_tensor(b * d, depth - 1)


@kernel(meta=_path_meta, cost=lambda tokens, paths: Work(nbytes(tokens) + 2 * nbytes(paths)), integer=True)
def path_tokens(tokens: Tensor, paths: Tensor) -> Tensor:
    """Draft tokens on the path to each node, without the root, which is no draft: [b · d, depth - 1] int64, -1 after
    the last. ``tokens`` [b, d], ``paths`` [b, d, depth] as ``verify.tree_paths`` has them."""
    b, d, depth = paths.shape
    drafts = paths[:, :, 1:]
    picked = tokens.gather(1, drafts.clamp(min=0).reshape(b, -1)).view(b * d, depth - 1)
    return torch.where(drafts.reshape(b * d, depth - 1) >= 0, picked, -1)


def _count(state: Tensor, values: Tensor, tokens: Tensor, *, adds: bool) -> None:
    """Counts column by column, so that sums are rounded as if the tokens had been generated one by one."""
    if not state.shape[0]:
        return
    wide = torch.cat([state, state[:, :1]], 1)  # a column more for entries that are no token
    for column in tokens.unbind(1):
        ids = torch.where(column >= 0, column, state.shape[1]).unsqueeze(1)
        if adds:
            wide.scatter_add_(1, ids, values)
        else:
            wide.scatter_(1, ids, values)
    state.copy_(wide[:, :-1])


def _along_cost(state: Tensor, values: Tensor, paths: Tensor) -> Work:
    rows = paths.shape[0] * state.shape[1] * state.element_size()
    return Work(nbytes(state, values, paths) + rows)


@kernel(
    meta=lambda state, paths: meta_tensor(paths.shape[0], state.shape[1], dtype=state.dtype), cost=_along_cost
)
def along_paths(state: Tensor, values: Tensor, paths: Tensor, adds: bool) -> Tensor:
    """A penalizer's ``state`` [b, vocab] as it would be at each node: [b · d, vocab]. ``values`` [b, 1] is what a
    token adds, or sets; ``paths`` [b · d, depth] int64 are each node's draft tokens, -1 after the last."""
    each = paths.shape[0] // state.shape[0]
    out = state.repeat_interleave(each, 0)
    _count(out, values.repeat_interleave(each, 0), paths, adds=adds)
    return out


@kernel(mutates=("state",), cost=lambda values, accepted: Work(nbytes(values) + 3 * nbytes(accepted)))
def count_accepted(state: Tensor, values: Tensor, accepted: Tensor, adds: bool) -> None:
    """Counts the tokens ``accepted`` [b, n] int64, -1 where there is none, in ``state`` [b, vocab], in their order."""
    _count(state, values, accepted, adds=adds)
