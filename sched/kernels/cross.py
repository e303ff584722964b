"""Which positions of an encoder-decoder's requests each kind of attention reads."""

from __future__ import annotations

import torch
from torch import Tensor

from .declare import INT64, kernel, meta_tensor, nbytes, reads, total_length
from .registry import Access, Work

Rows = tuple[Tensor, Tensor, Tensor]


def _meta(req_to_token: Tensor, seq_lens: Tensor, max_seq_len: int) -> Rows:
    b = seq_lens.shape[0]
    return meta_tensor(b, max_seq_len, dtype=req_to_token.dtype), meta_tensor(b), meta_tensor(b)


def _cost(req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor) -> Work:
    copied = 2 * req_to_token.element_size() * total_length(seq_lens)
    return Work(copied + nbytes(req_pool_indices, seq_lens) + 3 * INT64 * seq_lens.shape[0])


@kernel(
    meta=_meta,
    cost=_cost,
    footprint=lambda req_to_token, req_pool_indices, seq_lens, encoder_lens: (
        *reads(req_pool_indices, seq_lens),
        Access(req_to_token, write=False, rows=req_pool_indices, lens=seq_lens),
        Access(encoder_lens, write=False, rows=req_pool_indices),
    ),
    integer=True,
    fixed_cost=False,
)
def decoder_pages(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, encoder_lens: Tensor, max_seq_len: int
) -> Rows:
    """The slots of each request's decoder tokens [b, max_seq_len], which follow those of its encoder in its row of
    ``req_to_token`` [rows, context], and the number of its decoder and of its encoder tokens, [b] int64 each.
    ``encoder_lens`` [rows] is by request slot; ``seq_lens`` [b] counts both kinds."""
    encoder = encoder_lens[req_pool_indices]
    decoder = (seq_lens - encoder).clamp_(min=1)  # padding rows of a graph
    if req_to_token.device.type != "cpu":
        places = encoder.unsqueeze(1) + torch.arange(max_seq_len, device=seq_lens.device)
        return (
            req_to_token[req_pool_indices].gather(1, places.clamp_(max=req_to_token.shape[1] - 1)),
            decoder,
            encoder,
        )
    pages = req_to_token.new_zeros(seq_lens.shape[0], max_seq_len)
    rows = zip(req_pool_indices.tolist(), encoder.tolist(), decoder.tolist(), strict=True)
    for place, (row, start, count) in enumerate(rows):
        pages[place, :count] = req_to_token[row, start : start + count]
    return pages, decoder, encoder
