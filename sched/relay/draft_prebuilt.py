"""What the draft of a prebuilt batch starts from: the state of the prefill worker's last extend, in host memory."""

from __future__ import annotations

import numpy as np
import torch

from ..batch import DraftFuture, DraftInput, DraftState, FutureIndices, ScheduleBatch
from ..model.upload import Upload, upload
from .context import RelayContext
from .draft_row import DraftRelay


def seed_batch(context: RelayContext, relay: DraftRelay, batch: ScheduleBatch, state: DraftState) -> None:  # noqa: ARG001
    """Keep it in the batch for the serial worker; a blocking copy for each part."""
    batch.spec_info = _uploaded(context, batch, state, "pageable")


def seed_batch_packed(
    context: RelayContext,
    relay: DraftRelay,  # noqa: ARG001
    batch: ScheduleBatch,
    state: DraftState,
) -> None:
    """As ``seed_batch``, in one copy that does not block."""
    batch.spec_info = _uploaded(context, batch, state, "packed")


def seed_relay(context: RelayContext, relay: DraftRelay, batch: ScheduleBatch, state: DraftState) -> None:
    """Publish and stash it as after a forward. The event of publishing is recorded again behind the last forward's, so
    that waiting for it waits for both (#30435)."""
    if context.publish_ready is not None:
        context.streams.schedule.wait_event(context.publish_ready)
    seed_unchained(context, relay, batch, state)


def seed_unchained(context: RelayContext, relay: DraftRelay, batch: ScheduleBatch, state: DraftState) -> None:
    """As ``seed_relay``, but waiting for the event no longer waits for the running forward."""
    _seed(context, relay, batch, _uploaded(context, batch, state, "pageable"))


def seed_relay_packed(
    context: RelayContext, relay: DraftRelay, batch: ScheduleBatch, state: DraftState
) -> None:
    """Publish and stash it in one copy that does not block, without an event: only forwards read what is published."""
    _seed(context, relay, batch, _uploaded(context, batch, state, "packed"))


def _seed(context: RelayContext, relay: DraftRelay, batch: ScheduleBatch, draft: DraftInput) -> None:
    future: FutureIndices = context.futures.take(batch.req_pool_indices)
    relay.publish(batch, batch.seq_lens)
    relay.stash(future, draft)
    batch.input_ids = batch.output_ids = None
    batch.spec_info = DraftFuture(future, context.publish_ready)


def _uploaded(context: RelayContext, batch: ScheduleBatch, state: DraftState, how: Upload) -> DraftInput:
    arrays = [part.numpy() if part.dtype != torch.bfloat16 else _words(part) for part in state]
    topk_p, topk_index, hidden = upload(arrays, device=context.device, how=how)
    there = DraftState(topk_p, topk_index, hidden.view(state.hidden_states.dtype))
    return DraftInput(_bonus(context, batch), there)


def _words(part: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.int16]]:
    """The part as int16, since NumPy has no bfloat16."""
    return part.view(torch.int16).numpy()


def _bonus(context: RelayContext, batch: ScheduleBatch) -> torch.Tensor:
    """The first tokens, from where the state keeps them."""
    if batch.output_ids is not None:
        return batch.output_ids
    if batch.input_ids is not None:
        return batch.input_ids
    return context.futures.output_tokens_buf[batch.req_pool_indices]
