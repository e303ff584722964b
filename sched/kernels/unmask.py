"""One pass of block diffusion's decoding: which masked tokens become known."""

from __future__ import annotations

import torch
from torch import Tensor

from .declare import kernel, nbytes, reads
from .invariant import halving_sum
from .registry import Access, Work
from .sampling import GOLDEN64, mix64


def _cost(input_ids: Tensor, logits: Tensor) -> Work:
    return Work(2 * nbytes(input_ids) + nbytes(logits))


def _reveal(input_ids: Tensor, found: Tensor, confidence: Tensor, mask_id: int, threshold: float) -> None:
    """Replace the masks of input_ids [b, block] whose confidence exceeds the threshold, and in a block that has masks
    the most confident one in any case."""
    masked = input_ids == mask_id
    confidence = confidence.masked_fill(~masked, -1)
    best = torch.zeros_like(masked).scatter_(
        1, confidence.argmax(1, keepdim=True), masked.any(1, keepdim=True)
    )
    input_ids.copy_(torch.where(best | (confidence > threshold), found, input_ids))


@kernel(
    mutates=("input_ids",),
    cost=_cost,
    footprint=lambda input_ids, logits: (
        *reads(input_ids, logits),
        Access(input_ids, write=True),
    ),
)
def unmask(input_ids: Tensor, logits: Tensor, mask_id: int, threshold: float, block: int) -> None:
    """Replaces masks in input_ids [T] by the likeliest tokens of logits [T, v], where they are likely enough. T is a
    multiple of ``block``; no token from ``mask_id`` on is found. The confidence is the token's probability."""
    scores = logits[:, :mask_id].double()
    most, found = scores.max(1)
    confidence = 1 / halving_sum(torch.exp(scores - most.unsqueeze(1))).squeeze(1)
    _reveal(input_ids.view(-1, block), found.view(-1, block), confidence.view(-1, block), mask_id, threshold)


@kernel(
    mutates=("input_ids",),
    cost=_cost,
    footprint=lambda input_ids, logits, fingerprint: (
        *reads(input_ids, logits, fingerprint),
        Access(input_ids, write=True),
    ),
    integer=True,
)
def unmask_tagged(
    input_ids: Tensor, logits: Tensor, fingerprint: Tensor, mask_id: int, threshold: float, block: int
) -> None:
    """As ``unmask`` in cost; tokens and confidences are hashes of fingerprint [b] int64 and the place in the block.
    Only the logits' shape is used."""
    places = torch.arange(1, block + 1, device=fingerprint.device) * GOLDEN64
    words = mix64(fingerprint.unsqueeze(1) + places)
    confidence = (mix64(words) & 0xFFFFFF).double() / 0x1000000
    _reveal(
        input_ids.view(-1, block),
        (words & 0x7FFFFFFF) % (logits.shape[1] - 1),
        confidence,
        mask_id,
        threshold,
    )
