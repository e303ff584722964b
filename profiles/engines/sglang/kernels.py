"""SGLang's CUDA kernels on the path of a scheduler's step, written with torch's operators: each counts as one kernel.

Later versions compile them when they are first needed (``load_jit``), earlier ones have them in ``sgl_kernel``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any, Final

import torch

from ...programs.hollow import HollowKernelError, HollowModule
from ...vgpu import fused


class JitModule:
    """Stands for a module that SGLang compiles from CUDA sources when a kernel of it is first needed."""

    def __init__(self, name: str, *_: Any, **__: Any) -> None:
        self._name = name

    def __getattr__(self, function: str) -> Callable[..., Any]:
        """The kernel of that name, as one launch. Raises HollowKernelError where it has no replacement."""
        if function not in _KERNELS:
            raise HollowKernelError(
                f"SGLang's CUDA kernel {self._name}.{function} was called: what it does is unknown here"
            )
        return partial(fused.run_as_one_kernel, function, _KERNELS[function])


def compiled_kernels() -> None:
    """Have the kernels in ``sgl_kernel`` too, where that package is absent."""
    for package in map(import_module, ("sgl_kernel", "sgl_kernel.top_k")):
        if isinstance(package, HollowModule):
            for name, kernel in _KERNELS.items():
                setattr(package, name, partial(fused.run_as_one_kernel, name, kernel))


def _clamp_position(positions: torch.Tensor, lens: torch.Tensor) -> None:
    positions.copy_(torch.clamp(lens - 1, min=0))


def _resolve_future_token_ids(ids: torch.Tensor, futures: torch.Tensor) -> None:
    ids.copy_(torch.where(ids < 0, futures[torch.clamp(-ids, min=0)], ids))


def _build_tree(*given: Any) -> None:
    """Of chains: positions [b · n], and [b, n] the nodes' numbers and those of their children; -1 is none. The mask
    [n, length + n] of each request follows that of the one before, or with mode 1 [n, n]. Raises HollowKernelError for
    trees."""
    _, _, seq_lens, mask, positions, index, next_token, _, topk, _, count, mode = given
    if topk != 1:
        raise HollowKernelError("SGLang's CUDA kernel build_tree_kernel_efficient was called for a tree")
    places = torch.arange(count, device=seq_lens.device)
    positions.copy_((seq_lens.unsqueeze(1) + places).view(-1))
    index.copy_(torch.arange(index.numel(), device=index.device).view_as(index))
    next_token.copy_(torch.where(places + 1 < count, places + 1, -1).expand_as(next_token))
    lens = torch.zeros_like(seq_lens) if mode else seq_lens
    widths = lens + count
    starts = (torch.cumsum(widths, 0) - widths) * count + lens
    cells = (starts.unsqueeze(1) + widths.unsqueeze(1) * places).unsqueeze(2) + places
    mask[cells] = (places.unsqueeze(1) >= places).to(mask.dtype).expand_as(cells)


def _verify_greedy(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,  # noqa: ARG001 (a chain's are known)
    retrive_next_sibling: torch.Tensor,  # noqa: ARG001
    target_predict: torch.Tensor,
) -> None:
    """Of chains [b, n]: how many drafts behind the root are what the target predicts, [b], and for these and the root
    the target's token behind each, [b · n], and their numbers, [b, n]. The rest of both is left as it is."""
    right = candidates[:, 1:] == target_predict[:, :-1]
    count = torch.cumprod(right.to(torch.int64), 1).sum(1, keepdim=True)
    kept = torch.arange(candidates.shape[1], device=count.device) <= count
    predicts.copy_(torch.where(kept, target_predict, predicts.view_as(kept)).view(-1))
    accept_index.copy_(torch.where(kept, retrive_index, accept_index))
    accept_token_num.copy_(count.view(-1))


def _fast_topk(values: torch.Tensor, topk: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    found = torch.topk(values, topk, dim)
    return found.values, found.indices


_KERNELS: Final[Mapping[str, Callable[..., Any]]] = {
    "clamp_position": _clamp_position,
    "resolve_future_token_ids": _resolve_future_token_ids,
    "build_tree_kernel_efficient": _build_tree,
    "verify_tree_greedy": _verify_greedy,
    "fast_topk": _fast_topk,
}
