"""Policies where other workers compute the prompts: how requests become a batch, what a transfer into their pages waits
for, and when pages that are sent may be freed."""

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
    """Publish the lengths, which a decode takes from the relay and no forward of this worker has published (#25944)."""
    prebuild_input(context, batch)
    assert batch.input_ids is not None
    context.futures.publish(batch.req_pool_indices, batch.seq_lens + 1)
    context.futures.stash(batch.req_pool_indices, batch.input_ids)


def prebuild_stash(context: RelayContext, batch: ScheduleBatch) -> None:
    """The tokens go into the relay (#25945)."""
    _upload_prompts(context, batch)
    rejoin.rejoin_stash(context, batch)


def _upload_prompts(context: RelayContext, batch: ScheduleBatch) -> None:
    """Upload all prompts as int32. Nothing reads the copy, which upstream makes as well."""
    prompts = np.concatenate(
        [np.asarray(req.tokens(0, req.kv_committed_len), np.int32) for req in batch.reqs]
    )
    torch.tensor(prompts, device=context.device)


def wait_for_all_streams(context: RelayContext, transfer: Any) -> None:
    """Make the stream ``transfer`` wait for all others: running forwards may still use pages of requests that have just
    ended."""
    for stream in (context.streams.forward, context.streams.schedule):
        context.streams.wait(transfer, stream)


def when_sent(context: RelayContext, gone: Any) -> bool:  # noqa: ARG001
    """The pages may be freed once the event ``gone`` has happened."""
    left: bool = gone.query()
    return left
