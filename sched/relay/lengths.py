"""Sequence lengths and row numbers, on device and host."""

from __future__ import annotations

import torch

from ..batch import ScheduleBatch
from .context import RelayContext


def advance_in_place(context: RelayContext, batch: ScheduleBatch) -> None:
    """Add one in place: no forward in flight could still read the old lengths."""
    batch.seq_lens.add_(1)
    batch.seq_lens_cpu.add_(1)
    batch.orig_seq_lens.add_(1)


def advance_new_tensor(context: RelayContext, batch: ScheduleBatch) -> None:
    """Add one in new tensors: a queued forward still reads the old ones (#26020)."""
    batch.seq_lens = batch.seq_lens + 1
    advance_host_side(context, batch)


def advance_host_side(context: RelayContext, batch: ScheduleBatch) -> None:
    """Add one on the host; ``resolve`` takes the device's lengths from the last forward (#25944)."""
    batch.seq_lens_cpu = batch.seq_lens_cpu + 1
    batch.orig_seq_lens = batch.orig_seq_lens + 1


def allocate_by_batch_lengths(context: RelayContext, batch: ScheduleBatch) -> torch.Tensor:
    return batch.seq_lens


def allocate_by_mirror(context: RelayContext, batch: ScheduleBatch) -> torch.Tensor:
    """Upload the host's lengths, since between forwards the batch's own are sentinels (#25944)."""
    return batch.seq_lens_cpu.to(context.device, non_blocking=True)


def lengths_of_batch(context: RelayContext, batch: ScheduleBatch) -> torch.Tensor:
    """Place tokens in hot buffers by the batch's own lengths, the new token included."""
    return batch.seq_lens


def lengths_from_mirror(context: RelayContext, batch: ScheduleBatch) -> torch.Tensor:
    """Upload the host's lengths, since the batch's own are sentinels (not upstream's: #25944 uses the sentinels)."""
    return batch.seq_lens_cpu.to(context.device, non_blocking=True)


def lengths_mirrored(context: RelayContext, batch: ScheduleBatch) -> None:
    """Do nothing: the host mirror is exact."""


def indices_downloaded(context: RelayContext, batch: ScheduleBatch) -> torch.Tensor:
    """Row numbers on the host: a blocking copy for each use (before #26425)."""
    return batch.req_pool_indices.cpu()


def indices_mirrored(context: RelayContext, batch: ScheduleBatch) -> torch.Tensor:
    """Row numbers on the host, from the mirror (#26425)."""
    return batch.req_pool_indices_cpu
