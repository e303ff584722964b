"""A decoder whose floating-point work is skipped and whose results can still be checked.

The launches and their costs are the decoder's. The next token follows not from its logits but from an integer
fingerprint of the KV cache (``kernels/tags.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..batch import EncoderTokens, ForwardBatch, ModelOutput
from ..kernels.arrays import kept_array
from ..kernels.tags import Indices, gathered, kv_tags, position_weights, sent_ids
from .decoder import Model

_WORD = 1 << 64


class TagPool:
    """Two integers per KV slot, on the device of the page table."""

    def __init__(self, *, slots: int, context_len: int, device: torch.device) -> None:
        self.tags = torch.zeros(slots, dtype=torch.int64, device=device)
        self.sums = torch.zeros(slots, dtype=torch.int64, device=device)
        self.weights = position_weights(context_len).to(device)  # [context_len]


def audit(
    pool: TagPool, slots: Indices, *, peek: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.cpu
) -> int:
    """Returns 0 if the ``slots`` of positions 0, 1, ... of a request contain what was written for them, in order.

    ``peek`` gives the host's view of a device tensor.
    """
    if not len(slots):
        return 0
    stored = int(kept_array(peek(pool.sums))[slots[-1]])
    return (gathered(peek(pool.tags), peek(pool.weights), slots) - stored) % _WORD


@dataclass(frozen=True, slots=True, eq=False)
class TaggedDecoder:
    """Runs ``model`` for its launches and computes the result from tags. Where KV is not in the page table's slots,
    ``settle`` is called with each batch and its fingerprints, after a forward has written its tokens' tags."""

    model: Model
    pool: TagPool
    req_to_token: torch.Tensor
    settle: Callable[[ForwardBatch, torch.Tensor], None] | None = None

    def forward(self, batch: ForwardBatch) -> ModelOutput:
        """The model's output with a fingerprint [b] int64 per request. Pipeline stages also pass on the token ids."""
        output = self.model.forward(batch)
        if batch.mode.is_idle or (batch.part is not None and not batch.part.is_last):
            return output
        if batch.encoder is not None:
            self._tag_encoder(batch, batch.encoder)
        input_ids = batch.proxies[-1] if batch.proxies else batch.input_ids
        fingerprint = kv_tags(
            self.pool.tags,
            self.pool.sums,
            self.pool.weights,
            input_ids,
            self.req_to_token,
            batch.req_pool_indices,
            batch.seq_lens,
            batch.extend_lens,
            batch.out_cache_loc,
        )
        if self.settle is not None:
            self.settle(batch, fingerprint)
        proxies = (*output.proxies, sent_ids(input_ids)) if output.proxies else ()
        return ModelOutput(output.logits, fingerprint, proxies=proxies)

    def _tag_encoder(self, batch: ForwardBatch, encoder: EncoderTokens) -> None:
        """Tag the encoder's tokens, which the decoder's follow in each row."""
        kv_tags(
            self.pool.tags,
            self.pool.sums,
            self.pool.weights,
            encoder.input_ids,
            self.req_to_token,
            batch.req_pool_indices,
            encoder.lens,
            encoder.lens,
            encoder.out_cache_loc,
        )
