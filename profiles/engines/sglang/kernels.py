"""SGLang's CUDA kernels on the path of a scheduler's step, written with torch's operators: each counts as one kernel.

Later versions compile them when they are first needed (``load_jit``), earlier ones have them in ``sgl_kernel``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any, Final

import torch

from ....sched.kernels.verify import NONE, accept_drafts, tree_links, tree_paths
from ...programs.hollow import HollowKernelError, HollowModule
from ...vgpu import fused
from . import hisparse_kernels

_PACKAGES: Final = ("sgl_kernel", "sgl_kernel.top_k", "sgl_kernel.kvcacheio", "flashinfer.sampling")


class JitModule:
    """Stands for a module that SGLang compiles from CUDA sources when a kernel of it is first needed."""

    def __init__(self, name: str, *_: Any, **__: Any) -> None:
        self._name = name

    def __getattr__(self, function: str) -> Callable[..., Any]:
        """Launches the kernel of that name. Raises HollowKernelError where it has no replacement."""
        found = _FUNCTIONS.get(function, _FUNCTIONS.get(f"{self._name}.{function}"))
        if found is None:
            raise HollowKernelError(
                f"SGLang's CUDA kernel {self._name}.{function} was called: what it does is unknown here"
            )
        return found


def compiled_kernels() -> None:
    """Have the kernels in ``sgl_kernel`` and FlashInfer, too, where these packages are absent."""
    for package in map(import_module, _PACKAGES):
        if isinstance(package, HollowModule):
            for name, function in _FUNCTIONS.items():
                setattr(package, name, function)


def _clamp_position(positions: torch.Tensor, lens: torch.Tensor) -> None:
    positions.copy_(torch.clamp(lens - 1, min=0))


def _resolve_future_token_ids(ids: torch.Tensor, futures: torch.Tensor) -> None:
    ids.copy_(torch.where(ids < 0, futures[torch.clamp(-ids, min=0)], ids))


def _build_tree(
    parent_list: torch.Tensor,
    selected: torch.Tensor,
    seq_lens: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    index: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    count: int,
    mode: int,
) -> None:
    """Trees of ``count`` nodes each from the candidates ``selected`` [b, count - 1]: positions [b · count], and
    [b, count] the nodes' numbers, their first children and next siblings; -1 is none. The mask [count, length + count]
    of each request follows that of the one before, or with mode 1 [count, count]."""
    nodes = torch.arange(count, device=seq_lens.device)
    if topk == 1:
        parents = (nodes - 1).expand_as(index)
    else:
        parents = _parents_of_candidates(parent_list, selected, topk)
    paths, lengths = tree_paths(parents, depth + 1)
    positions.copy_((seq_lens.unsqueeze(1) + lengths - 1).view(-1))
    index.copy_(torch.arange(index.numel(), device=index.device).view_as(index))
    for out, links in zip((next_token, next_sibling), tree_links(parents), strict=True):
        out.copy_(links)
    ancestors = (paths.unsqueeze(3) == nodes).any(2)
    mask[mask_cells(torch.zeros_like(seq_lens) if mode else seq_lens, count)] = ancestors.to(mask.dtype)


def _parents_of_candidates(parent_list: torch.Tensor, selected: torch.Tensor, topk: int) -> torch.Tensor:
    """The parents [b, count] of the root and the selected candidates. A candidate's entry in ``parent_list`` is the
    candidate that it continues, and entry 0 is the root."""
    entries = selected // topk
    continued = parent_list.gather(1, entries)
    places = (selected.unsqueeze(1) == continued.unsqueeze(2)).to(torch.int8).argmax(2) + 1
    parents = torch.where(entries > 0, places, 0)
    return torch.cat([torch.full_like(parents[:, :1], NONE), parents], 1)


def mask_cells(lens: torch.Tensor, count: int) -> torch.Tensor:
    """The cells [b, count, count] of a mask that are about drafts: each of ``count`` drafts has a row, of its request's
    ``lens`` [b] cells and one for each draft. The rows of a request follow those of the one before."""
    places = torch.arange(count, device=lens.device)
    widths = lens + count
    starts = (torch.cumsum(widths, 0) - widths) * count + lens
    return (starts.unsqueeze(1) + widths.unsqueeze(1) * places).unsqueeze(2) + places


def _parents_of_links(next_token: torch.Tensor, next_sibling: torch.Tensor) -> torch.Tensor:
    """The parents [b, d] of trees that are given by first children and next siblings, which come behind them."""
    d = next_token.shape[1]
    parents = next_token.new_full((len(next_token), d + 1), NONE)  # the last column is of what is not there
    for node in range(d):
        for links, parent in (
            (next_token, torch.full_like(parents[:, 0], node)),
            (next_sibling, parents[:, node].clone()),
        ):
            linked = links[:, node]
            parents.scatter_(1, torch.where(linked < 0, d, linked).unsqueeze(1), parent.unsqueeze(1))
    return parents[:, :d]


def _verify_greedy(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,  # noqa: ARG001 (the nodes' numbers)
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Of trees [b, d]: how many drafts behind the root are what the target predicts, [b], and for these and the root
    the target's token behind each, [b · d], and their numbers, [b, depth]. The rest of both is left as it is."""
    parents = _parents_of_links(retrive_next_token, retrive_next_sibling)
    wanted = target_predict.reshape(-1)
    walked, count = accept_drafts(candidates, parents, wanted, accept_index.shape[1])
    _store_walk(predicts, accept_index, walked, wanted)
    accept_token_num.copy_(count - 1)


def _store_walk(
    predicts: torch.Tensor, accept_index: torch.Tensor, walked: torch.Tensor, tokens: torch.Tensor
) -> None:
    """Store the nodes ``walked`` [b, depth], -1 after the last, and of ``tokens`` [b · d] those behind them."""
    size = tokens.numel()
    kept = torch.zeros(size + 1, dtype=torch.bool, device=tokens.device)
    kept.index_fill_(0, torch.where(walked < 0, size, walked).view(-1).to(torch.int64), value=True)
    predicts[:size].copy_(torch.where(kept[:size], tokens, predicts[:size]))
    accept_index.copy_(torch.where(walked < 0, accept_index, walked))


def _sample_tree(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,  # noqa: ARG001 (the nodes' numbers)
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,  # noqa: ARG001
) -> None:
    """``_verify_greedy`` where the target has probabilities [b, d, vocab]: the children of a node are taken one after
    the other, each with the target's probability of it, by the ``uniform_samples`` [b, d] of the node. The token behind
    the last one is drawn from what is left of the target's distribution. ``draft_probs`` get what was rejected."""
    (b, d), most = candidates.shape, accept_index.shape[1]
    rows = torch.arange(b, device=candidates.device)
    node = torch.zeros_like(rows)
    walked, tokens = [rows * d], candidates.new_zeros(b, d)
    for _ in range(most - 1):
        goes_on = walked[-1] >= 0
        child = torch.where(goes_on, retrive_next_token[rows, node], NONE)
        taken, tried = torch.full_like(rows, NONE), target_probs.new_zeros(b)
        for _ in range(d - 1):
            at = child.clamp(min=0)
            token = candidates[rows, at]
            probability = target_probs[rows, node, token]
            tried = torch.where(child < 0, tried, tried + probability)
            fits = uniform_samples[rows, node] <= tried / threshold_acc
            takes = (child >= 0) & (fits | (probability >= threshold_single))
            rejected = (child >= 0) & ~takes
            draft_probs[rows, node, token] = torch.where(
                rejected, probability, draft_probs[rows, node, token]
            )
            tokens[rows, node] = torch.where(takes, token, tokens[rows, node])
            taken = torch.where(takes, child, taken)
            child = torch.where(rejected, retrive_next_sibling[rows, at], NONE)
        node = torch.where(taken < 0, node, taken)
        walked.append(torch.where(taken < 0, NONE, rows * d + taken))
    places = torch.stack(walked, 1).to(accept_index.dtype)
    count = (places >= 0).sum(1)
    rejected_probs = torch.where((count < most).unsqueeze(1), draft_probs[rows, node], 0)
    sums = torch.cumsum(torch.relu(target_probs[rows, node] - rejected_probs), 1)
    drawn = (sums <= (uniform_samples_for_final_sampling * sums[:, -1]).unsqueeze(1)).sum(1)
    tokens[rows, node] = drawn.clamp(max=sums.shape[1] - 1).to(tokens.dtype)
    _store_walk(predicts, accept_index, places, tokens.view(-1).to(predicts.dtype))
    accept_token_num.copy_(count - 1)


def _top_k_renorm(probs: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Probabilities [n, vocab] below the ``top_k`` [n] greatest become 0; the rest has sum 1."""
    greatest = probs.sort(dim=-1, descending=True).values
    least = greatest.gather(1, (top_k.view(-1, 1).to(torch.int64) - 1).clamp(0, probs.shape[-1] - 1))
    return _normalised(torch.where(probs >= least, probs, 0))


def _top_p_renorm(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Probabilities [n, vocab] behind the greatest whose sum reaches ``top_p`` [n] become 0; the rest has sum 1."""
    ordered = probs.sort(dim=-1, descending=True)
    before = torch.cumsum(ordered.values, -1) - ordered.values
    kept = torch.where(before < top_p.view(-1, 1), ordered.values, 0)
    return _normalised(torch.zeros_like(probs).scatter(-1, ordered.indices, kept))


def _normalised(probs: torch.Tensor) -> torch.Tensor:
    return probs / probs.sum(-1, keepdim=True)


def _fast_topk(values: torch.Tensor, topk: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    found = torch.topk(values, topk, dim)
    return found.values, found.indices


_KERNELS: Final[Mapping[str, Callable[..., Any]]] = {
    "clamp_position": _clamp_position,
    "resolve_future_token_ids": _resolve_future_token_ids,
    "build_tree_kernel_efficient": _build_tree,
    "verify_tree_greedy": _verify_greedy,
    "tree_speculative_sampling_target_only": _sample_tree,
    "top_k_renorm_prob": _top_k_renorm,
    "top_p_renorm_prob": _top_p_renorm,
    "top_k_renorm_probs": _top_k_renorm,
    "top_p_renorm_probs": _top_p_renorm,
    "fast_topk": _fast_topk,
    "speculative_sampling.sample": _sample_tree,
}


_FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    **{
        place: partial(fused.run_as_one_kernel, place.rpartition(".")[2], one)
        for place, one in _KERNELS.items()
    },
    # Those that launch a kernel whose time and accesses follow from its values, or none.
    "load_cache_to_device_buffer": hisparse_kernels.swap_in,
    "launch_all_mla": hisparse_kernels.back_up,
    "transfer_kv_all_layer_mla": hisparse_kernels.back_up_by_names,
    "fits_device": lambda _: True,
    "get_device_accessible_ptr": lambda tensor, _: tensor.data_ptr(),
}
