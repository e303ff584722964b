"""Where prompts are computed by other workers: how their requests become a batch (``prebuild``), what a transfer into
their pages comes after (``before_transfer``), and when pages that are sent may go (``has_left``)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..batch import ScheduleBatch
from . import rejoin
from .desk import Desk


def prebuild_output(desk: Desk, batch: ScheduleBatch) -> None:
    """The first tokens are the bridge (before #25774)."""
    _upload_prompts(desk, batch)
    rejoin.rejoin_output(desk, batch)


def prebuild_input(desk: Desk, batch: ScheduleBatch) -> None:
    """The same, as the next input (#25774)."""
    _upload_prompts(desk, batch)
    rejoin.rejoin_input(desk, batch)


def prebuild_publishing(desk: Desk, batch: ScheduleBatch) -> None:
    """A decode's lengths come from the relay, where no forward of this worker has put them (#25944)."""
    prebuild_input(desk, batch)
    assert batch.req_pool_indices is not None and batch.seq_lens is not None and batch.input_ids is not None
    desk.futures.publish(batch.req_pool_indices, batch.seq_lens + 1)
    desk.futures.stash(batch.req_pool_indices, batch.input_ids)


def prebuild_stash(desk: Desk, batch: ScheduleBatch) -> None:
    """The tokens go into the relay (#25945)."""
    _upload_prompts(desk, batch)
    rejoin.rejoin_stash(desk, batch)


def _upload_prompts(desk: Desk, batch: ScheduleBatch) -> None:
    """All prompts as int32, of which nothing is read: kept because upstream makes the copy."""
    prompts = np.concatenate(
        [np.asarray(req.tokens(0, req.kv_committed_len), np.int32) for req in batch.reqs]
    )
    torch.tensor(prompts, device=desk.device)


def behind_everything(desk: Desk, transfer: Any) -> None:
    """On the stream ``transfer``: pages that were free until now may be read and written by forwards that run, for
    requests that have just ended."""
    for stream in (desk.streams.forward, desk.streams.schedule):
        desk.streams.wait(transfer, stream)


def when_sent(desk: Desk, gone: Any) -> bool:  # noqa: ARG001
    """Behind the event ``gone`` nobody reads them any more."""
    left: bool = gone.query()
    return left
