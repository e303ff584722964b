"""Where prompts are computed by other workers: how their requests become a batch (``prebuild``), what a transfer into
their pages comes after (``before_transfer``), and when pages that are sent may go (``has_left``)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..batch import ScheduleBatch
from . import rejoin
from .context import RelayContext


def prebuild_output(context: RelayContext, batch: ScheduleBatch) -> None:
    """The first tokens are the bridge (before #25774)."""
    _upload_prompts(context, batch)
    rejoin.rejoin_output(context, batch)


def prebuild_input(context: RelayContext, batch: ScheduleBatch) -> None:
    """The same, as the next input (#25774)."""
    _upload_prompts(context, batch)
    rejoin.rejoin_input(context, batch)


def prebuild_publishing(context: RelayContext, batch: ScheduleBatch) -> None:
    """A decode's lengths come from the relay, where no forward of this worker has put them (#25944)."""
    prebuild_input(context, batch)
    assert batch.input_ids is not None
    context.futures.publish(batch.req_pool_indices, batch.seq_lens + 1)
    context.futures.stash(batch.req_pool_indices, batch.input_ids)


def prebuild_stash(context: RelayContext, batch: ScheduleBatch) -> None:
    """The tokens go into the relay (#25945)."""
    _upload_prompts(context, batch)
    rejoin.rejoin_stash(context, batch)


def _upload_prompts(context: RelayContext, batch: ScheduleBatch) -> None:
    """All prompts as int32, of which nothing is read: kept because upstream makes the copy."""
    prompts = np.concatenate(
        [np.asarray(req.tokens(0, req.kv_committed_len), np.int32) for req in batch.reqs]
    )
    torch.tensor(prompts, device=context.device)


def behind_everything(context: RelayContext, transfer: Any) -> None:
    """On the stream ``transfer``: pages that were free until now may be read and written by forwards that run, for
    requests that have just ended."""
    for stream in (context.streams.forward, context.streams.schedule):
        context.streams.wait(transfer, stream)


def when_sent(context: RelayContext, gone: Any) -> bool:  # noqa: ARG001
    """Behind the event ``gone`` nobody reads them any more."""
    left: bool = gone.query()
    return left
