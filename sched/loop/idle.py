"""The batch of a rank without work, which takes part in the other ranks' step (upstream ``prepare_for_idle``)."""

from __future__ import annotations

import torch

from ..batch import ForwardMode, ScheduleBatch
from ..model.sampling_info import SamplingInfo
from .engine import Engine


def idle_batch(engine: Engine, step: int) -> ScheduleBatch:
    """A batch of empty tensors: nothing is uploaded and nothing is launched."""
    device = engine.config.device

    def empty(dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(0, dtype=dtype, device=device)

    batch = ScheduleBatch(reqs=[], forward_mode=ForwardMode.IDLE, step=step)
    batch.input_ids, batch.positions = empty(), empty()
    batch.req_pool_indices, batch.req_pool_indices_cpu = empty(), torch.empty(0, dtype=torch.int64)
    batch.seq_lens, batch.seq_lens_cpu = empty(), torch.empty(0, dtype=torch.int64)
    batch.orig_seq_lens = empty(torch.int32)
    batch.out_cache_loc = empty()
    batch.sampling_info = SamplingInfo.empty(engine.config)
    return batch
