"""How requests whose prompt another worker has computed become a batch (``prebuild``): as those that rejoin, and what
else upstream does."""

from __future__ import annotations

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
