"""Sequence lengths and row numbers, on device and host; also under speculation, where the number of accepted drafts is
on the device only."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..batch import DraftFuture, ExtendLens, ScheduleBatch
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


# ---- the event that travels with the batch (before #25879) ---------------------------------------------------


def wait_verify_done(context: RelayContext, batch: ScheduleBatch) -> None:
    """Order schedule work on the batch's lengths behind the verify that made them; the host does not wait (#25465)."""
    future = batch.spec_info
    if isinstance(future, DraftFuture) and future.verify_done is not None:
        context.streams.schedule.wait_event(future.verify_done)


def lengths_downloaded_early(context: RelayContext, batch: ScheduleBatch) -> None:
    """Wait for the verify, then read its lengths back."""
    wait_verify_done(context, batch)
    batch.seq_lens_cpu = batch.seq_lens.cpu()


def mark_verified(context: RelayContext, batch: ScheduleBatch, lengths: torch.Tensor) -> None:
    """Record an event behind the new lengths. Every step has one of its own, which the batch carries."""
    if context.config.capabilities.events:
        context.publish_ready = context.streams.module.Event()
        context.publish_ready.record()


# ---- lengths by way of the FutureMap (#25879) ----------------------------------------------------------------


def publish_lengths(context: RelayContext, batch: ScheduleBatch, lengths: torch.Tensor) -> None:
    """Publish the lengths, and an event behind which the schedule may read them before the forward's end."""
    context.futures.publish(batch.req_pool_indices, lengths)
    if context.config.capabilities.events:
        if context.publish_ready is None:
            context.publish_ready = context.streams.module.Event()
        context.publish_ready.record()


def publish_for_forwards(context: RelayContext, batch: ScheduleBatch, lengths: torch.Tensor) -> None:
    """Publish without an event: only the next forward reads the lengths, later on the same stream."""
    context.futures.publish(batch.req_pool_indices, lengths)


def lengths_downloaded(context: RelayContext, batch: ScheduleBatch) -> None:
    """Wait for the published lengths and read those of the batch back (#25879). ``resolve`` gathers the device's."""
    future = batch.spec_info
    if isinstance(future, DraftFuture):
        batch.seq_lens_cpu = _gathered(context, future).cpu()


def lengths_gathered_and_downloaded(context: RelayContext, batch: ScheduleBatch) -> None:
    """Read them back and gather them: the batch owns host and device lengths as a pair (#26020)."""
    future = batch.spec_info
    if isinstance(future, DraftFuture):
        batch.seq_lens = _gathered(context, future)
        batch.seq_lens_cpu = batch.seq_lens.cpu()


def lengths_by_private_stream(context: RelayContext, batch: ScheduleBatch) -> None:
    """Copy all published lengths to a pinned buffer on a stream of their own. The host waits for that stream alone: for
    the verify, not for what the schedule stream waits for (#26380)."""
    future = batch.spec_info
    if not isinstance(future, DraftFuture):
        return
    batch.seq_lens = _gathered(context, future)
    if (
        context.publish_ready is None
        or not context.pinned
        or context.streams.schedule is context.streams.forward
    ):
        batch.seq_lens_cpu = batch.seq_lens.cpu()
        return
    stream, pinned = context.lengths_stream, context.pinned_lengths
    with context.streams.on(stream):
        stream.wait_event(context.publish_ready)
        pinned.copy_(context.futures.new_seq_lens_buf, non_blocking=True)
    stream.synchronize()
    batch.seq_lens_cpu = pinned[batch.req_pool_indices_cpu]


def lengths_bounded(context: RelayContext, batch: ScheduleBatch) -> None:
    """Gather them on the device alone: the host uses the bound up to which slots are allocated (#26128)."""
    future = batch.spec_info
    if isinstance(future, DraftFuture):
        batch.seq_lens = _gathered(context, future)
        batch.unset("seq_lens_cpu")


def lengths_left_on_the_device(context: RelayContext, batch: ScheduleBatch) -> None:
    """Gather nothing on the schedule stream: ``resolve`` gathers the lengths on the forward stream."""
    if isinstance(batch.spec_info, DraftFuture):
        batch.unset("seq_lens_cpu")


def _gathered(context: RelayContext, future: DraftFuture) -> torch.Tensor:
    """The lengths, gathered on the schedule stream behind their publishing."""
    if context.publish_ready is not None:
        context.streams.schedule.wait_event(context.publish_ready)
    else:
        context.streams.wait(context.streams.schedule, context.streams.forward)
    return context.futures.new_seq_lens_buf[future.future_indices.indices]


# ---- lengths of the draft's own extend -----------------------------------------------------------------------


def lens_uploaded(context: RelayContext, extend: Sequence[int], prefix: Sequence[int]) -> ExtendLens:
    """Two copies from pageable memory, as upstream makes them for every forward batch."""
    extend_lens = torch.tensor(extend, dtype=torch.int32).to(context.device, non_blocking=True)
    prefix_lens = torch.tensor(prefix, dtype=torch.int32).to(context.device, non_blocking=True)
    return extend_lens, prefix_lens


def lens_packed(context: RelayContext, extend: Sequence[int], prefix: Sequence[int]) -> ExtendLens:
    """One asynchronous copy."""
    host = torch.tensor([extend, prefix], dtype=torch.int32, pin_memory=context.pinned)
    extend_lens, prefix_lens = host.to(context.device, non_blocking=True).unbind()
    return extend_lens, prefix_lens


def prompt_lens_uploaded(context: RelayContext, batch: ScheduleBatch, lens: ExtendLens) -> ExtendLens:
    """Upload for the draft's forward batch what the target's has uploaded already."""
    return lens_uploaded(context, batch.extend_lens, batch.prefix_lens)


def prompt_lens_shared(context: RelayContext, batch: ScheduleBatch, lens: ExtendLens) -> ExtendLens:
    return lens


def step_lens_uploaded(context: RelayContext, batch: ScheduleBatch, count: int) -> ExtendLens:
    return lens_uploaded(context, [count] * batch.batch_size, batch.seq_lens_cpu.tolist())


def step_lens_made_on_device(context: RelayContext, batch: ScheduleBatch, count: int) -> ExtendLens:
    """Make them on the device, since the host has no lengths (#26128)."""
    extend_lens = torch.full((batch.batch_size,), count, dtype=torch.int32, device=context.device)
    return extend_lens, batch.seq_lens.to(torch.int32)


def draft_lengths_in_the_batch(context: RelayContext, batch: ScheduleBatch, count: int) -> torch.Tensor:
    """Lengthen the batch itself by the verified tokens; only isolation restores its lengths (before #26020)."""
    batch.seq_lens = batch.seq_lens + count
    if batch.has_host_lengths:
        batch.seq_lens_cpu = batch.seq_lens_cpu + count
    return batch.seq_lens


def draft_lengths_of_the_forward(context: RelayContext, batch: ScheduleBatch, count: int) -> torch.Tensor:
    """Lengthen the forward's view alone (#26020)."""
    return batch.seq_lens + count


def nothing_to_do(context: RelayContext, batch: ScheduleBatch) -> None:
    """Do nothing: the state or the worker has no such part."""


def nothing_to_publish(context: RelayContext, batch: ScheduleBatch, lengths: torch.Tensor) -> None:
    """Publish nothing: the serial worker's lengths stay in the batch."""
