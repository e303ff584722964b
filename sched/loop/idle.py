"""A step of nobody: a rank without work takes part in the others' (upstream ``prepare_for_idle``)."""

from __future__ import annotations

import torch

from ..batch import ForwardMode, ScheduleBatch
from ..model.sampling_info import SamplingInfo
from .engine import Engine


def idle_batch(engine: Engine, step: int) -> ScheduleBatch:
    """All tensors empty: nothing is uploaded, and nothing launched."""
    device = engine.config.device

    def nobody(dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(0, dtype=dtype, device=device)

    batch = ScheduleBatch(reqs=[], forward_mode=ForwardMode.IDLE, step=step)
    batch.input_ids, batch.positions = nobody(), nobody()
    batch.req_pool_indices, batch.req_pool_indices_cpu = nobody(), torch.empty(0, dtype=torch.int64)
    batch.seq_lens, batch.seq_lens_cpu = nobody(), torch.empty(0, dtype=torch.int64)
    batch.orig_seq_lens = nobody(torch.int32)
    batch.out_cache_loc = nobody()
    batch.sampling_info = SamplingInfo.empty(engine.config)
    return batch
