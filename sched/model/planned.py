"""Attention that is planned once a forward, on the host, and then run by every layer.

A plan wants the rows' starts on the host, and lengths are on the device: they are copied and waited for, behind all
that the forward's stream was given before. That is what such a library costs a scheduler, and it shows in the counts.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, Protocol

import torch

from ..batch import ForwardBatch
from ..kernels.allocation import runs
from .config import ModelConfig

WORKSPACE: Final = 128 << 20  # bytes, as the library's documentation recommends
_GROUPED: Final = 4  # query heads of a KV head from which on its tensor-core kernels are the faster ones


class PlannedAttention(Protocol):
    def plan(self, batch: ForwardBatch) -> None:
        """For all layers of this forward."""

    def __call__(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        """q [T, heads, d] on caches [slots, kv_heads, d] → [T, heads · d]."""


class _Rows(NamedTuple):
    """Where each request's positions are. A slot is a page of one token."""

    starts: torch.Tensor  # [b + 1] int32, on the host: of its slots
    query_starts: torch.Tensor  # [b + 1] int32, on the host: of its new tokens
    slots: torch.Tensor  # [starts[-1]] int32
    last: torch.Tensor  # [b] int32, on the host: tokens in a last page


class FlashInfer:
    """``library`` is the module ``flashinfer``, or one with its two wrappers."""

    def __init__(self, config: ModelConfig, req_to_token: torch.Tensor, *, library: Any) -> None:
        self._config = config
        self._req_to_token = req_to_token
        workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=req_to_token.device)
        grouped = config.num_heads // config.num_kv_heads >= _GROUPED
        self._decode = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=grouped)
        self._prefill = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        self._planned: Any = None

    def plan(self, batch: ForwardBatch) -> None:
        """One blocking copy of lengths to the host, and what the library's own plan copies."""
        rows = self._rows(batch)
        pages = (rows.starts, rows.slots, rows.last)
        shape = (self._config.num_heads, self._config.num_kv_heads, self._config.head_dim, 1)
        how = {
            "sm_scale": self._config.head_dim**-0.5,
            "q_data_type": self._config.dtype,
            "kv_data_type": self._config.dtype,
        }
        if batch.extend_lens is None:
            self._planned = self._decode
            self._planned.plan(*pages, *shape, **how)
        else:
            self._planned = self._prefill
            self._planned.plan(rows.query_starts, *pages, *shape, causal=True, **how)

    def __call__(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._planned.run(q, (k_cache.unsqueeze(1), v_cache.unsqueeze(1)))
        return out.reshape(q.shape[0], -1)

    def _rows(self, batch: ForwardBatch) -> _Rows:
        lens = batch.seq_lens
        new = torch.ones_like(lens) if batch.extend_lens is None else batch.extend_lens.to(lens.dtype)
        on_host = torch.stack((lens, new)).cpu()
        starts, query_starts = torch.nn.functional.pad(on_host.cumsum(1), (1, 0)).to(torch.int32)
        total = int(starts[-1])
        owner = torch.repeat_interleave(batch.req_pool_indices, lens, output_size=total)
        slots = self._req_to_token[owner, runs(torch.zeros_like(lens), lens, total)]
        last = torch.ones(batch.batch_size, dtype=torch.int32)
        return _Rows(starts, query_starts, slots.to(torch.int32), last)
