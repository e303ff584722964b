"""What the draft of a prebuilt batch starts from: the prefill worker's last extend, by the host's memory (``seed``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..batch import DraftInput, FutureIndices, ScheduleBatch
from ..model.upload import Upload, upload
from .desk import Desk

if TYPE_CHECKING:
    from .draft_row import DraftRelay

# Of the requests together: topk_p and topk_index [b, topk], hidden states [b, hidden].
DraftParts = Sequence[torch.Tensor]


def seed_batch(desk: Desk, relay: DraftRelay, batch: ScheduleBatch, parts: DraftParts) -> None:  # noqa: ARG001
    """The serial worker carries it in the batch: a blocking copy for each part."""
    batch.spec_info = _uploaded(desk, batch, parts, "pageable")


def seed_batch_packed(desk: Desk, relay: DraftRelay, batch: ScheduleBatch, parts: DraftParts) -> None:  # noqa: ARG001
    """One copy that does not block."""
    batch.spec_info = _uploaded(desk, batch, parts, "packed")


def seed_relay(desk: Desk, relay: DraftRelay, batch: ScheduleBatch, parts: DraftParts) -> None:
    """Published and stashed as after a forward. The one event of publishing is recorded anew behind the last forward's:
    who waits for it waits for both (#30435)."""
    if desk.publish_ready is not None:
        desk.streams.schedule.wait_event(desk.publish_ready)
    seed_unchained(desk, relay, batch, parts)


def seed_unchained(desk: Desk, relay: DraftRelay, batch: ScheduleBatch, parts: DraftParts) -> None:
    """The same, and whoever waits for the event no longer waits for the forward that is under way."""
    _seed(desk, relay, batch, _uploaded(desk, batch, parts, "pageable"))


def seed_relay_packed(desk: Desk, relay: DraftRelay, batch: ScheduleBatch, parts: DraftParts) -> None:
    """One copy that does not block, and no event: only forwards read what is published."""
    _seed(desk, relay, batch, _uploaded(desk, batch, parts, "packed"))


def _seed(desk: Desk, relay: DraftRelay, batch: ScheduleBatch, draft: DraftInput) -> None:
    assert batch.req_pool_indices is not None and batch.seq_lens is not None
    future: FutureIndices = desk.futures.take(batch.req_pool_indices)
    relay.publish(batch, batch.seq_lens)
    relay.stash(future, draft)
    batch.input_ids = batch.output_ids = None
    batch.spec_info = DraftInput(future_indices=future, verify_done=desk.publish_ready)


def _uploaded(desk: Desk, batch: ScheduleBatch, parts: DraftParts, how: Upload) -> DraftInput:
    arrays = [part.numpy() if part.dtype != torch.bfloat16 else _words(part) for part in parts]
    topk_p, topk_index, hidden = upload(arrays, device=desk.device, how=how)
    return DraftInput(_bonus(desk, batch), topk_p, topk_index, hidden.view(parts[2].dtype))


def _words(part: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.int16]]:
    """NumPy has no bfloat16."""
    return part.view(torch.int16).numpy()


def _bonus(desk: Desk, batch: ScheduleBatch) -> torch.Tensor:
    """The first tokens, wherever the state has put them."""
    if batch.output_ids is not None:
        return batch.output_ids
    if batch.input_ids is not None:
        return batch.input_ids
    return desk.futures.output_tokens_buf[batch.req_pool_indices]


Seed = Callable[[Desk, "DraftRelay", ScheduleBatch, DraftParts], None]
