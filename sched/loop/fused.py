"""Allocation of rows, KV slots and page-table entries of a batch's new tokens by one upload and one kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..batch import ScheduleBatch
from ..kernels.placement import place_decode, place_extend
from ..memory.allocation import claim_pages
from ..model.sampling_info import host_rows, packed_words
from .engine import Engine
from .split import orig_seq_lens


def place_prompts(engine: Engine, batch: ScheduleBatch) -> torch.Tensor | None:
    """As ``split.place_prompts``. Returns the sampling parameters [b, 6] int32 if they are part of the upload."""
    prefix_lens, words = _upload(engine, batch)
    size = engine.config.page_size
    batch.out_cache_loc = place_extend(
        engine.slots.req_to_token,
        batch.req_pool_indices,
        _prefixes(engine, batch),
        prefix_lens,
        batch.seq_lens,
        claim_pages(engine.cache, _pages(batch, size)),
        size,
        batch.extend_num_tokens,
    )
    return words


def place_tokens(engine: Engine, batch: ScheduleBatch) -> None:
    """As ``split.place_tokens``."""
    size = engine.config.page_size
    pages = batch.batch_size if size == 1 else int((batch.seq_lens_cpu % size == 0).sum())
    batch.out_cache_loc, batch.seq_lens, batch.orig_seq_lens = place_decode(
        engine.slots.req_to_token,
        batch.req_pool_indices,
        batch.seq_lens,
        batch.orig_seq_lens,
        claim_pages(engine.cache, pages),
        size,
    )
    batch.seq_lens_cpu = batch.seq_lens_cpu + 1


def _upload(engine: Engine, batch: ScheduleBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Lengths, rows and sampling parameters as one pinned copy::

        int32 words   |-- seq_lens, rows, prefix_lens: 6 b --|-- sampling: 6 b --|-- orig, extend, prefix: 3 b --|
                      |-- three int64 each ------------------|-- if packed ------|-- int32 ---------------------|

    Returns the prefix lengths [b] int64 and the sampling parameters.
    """
    b = batch.batch_size
    wide = np.stack([batch.seq_lens_cpu.numpy(), batch.req_pool_indices_cpu.numpy(), batch.prefix_lens])
    words = _sampling_words(engine, batch)
    narrow = np.array([orig_seq_lens(batch), batch.extend_lens, batch.prefix_lens], np.int32)
    host = np.concatenate(
        [wide.astype(np.int64).view(np.int32).reshape(-1), words.reshape(-1), narrow.reshape(-1)]
    )
    device = _sent(engine, torch.from_numpy(host))
    batch.seq_lens, batch.req_pool_indices, prefix_lens = (
        device[: 6 * b].view(torch.int64).view(3, b).unbind()
    )
    rows = device[-3 * b :].view(3, b)
    batch.orig_seq_lens, batch.extend_rows = rows[0], rows[1:]
    return prefix_lens, device[6 * b : 12 * b].view(b, 6) if words.size else None


def _sampling_words(engine: Engine, batch: ScheduleBatch) -> np.ndarray[Any, np.dtype[np.int32]]:
    if engine.relay.row.sampling_tensors != "packed" or not engine.pinned:
        return np.empty(0, np.int32)
    return packed_words(host_rows(batch.reqs, engine.config))


def _sent(engine: Engine, host: torch.Tensor) -> torch.Tensor:
    return (host.pin_memory() if engine.pinned else host).to(engine.config.device, non_blocking=True)


def _pages(batch: ScheduleBatch, size: int) -> int:
    """The number of pages that the new tokens need."""
    if size == 1:
        return batch.extend_num_tokens
    held = zip(batch.prefix_lens, batch.extend_lens, strict=True)
    return sum(-(-(prefix + extend) // size) - -(-prefix // size) for prefix, extend in held)


def _prefixes(engine: Engine, batch: ScheduleBatch) -> torch.Tensor:
    """Slots of all cached prefixes, one request after the other."""
    cached = [req.prefix_indices for req in batch.reqs if req.prefix_indices is not None and req.prefix_len]
    if len(cached) == 1:
        return cached[0]
    return torch.cat(cached) if cached else torch.empty(0, dtype=torch.int64, device=engine.config.device)
