"""How requests that were staged come back as a batch of their own (``bootstrap``), and which rows of a batch a backup
is told of (``backup_rows``). Only with KV on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ..batch import ScheduleBatch
from ..model.upload import upload
from .desk import Desk

Bootstrap = Callable[[Desk, ScheduleBatch], None]


def rejoin_output(desk: Desk, batch: ScheduleBatch) -> None:
    """The last tokens are the bridge, as the host knows them (before #25774)."""
    _upload_rows(desk, batch)
    batch.output_ids = _last_tokens(desk, batch)


def rejoin_input(desk: Desk, batch: ScheduleBatch) -> None:
    """The same, as the next input (#25774)."""
    _upload_rows(desk, batch)
    batch.input_ids = _last_tokens(desk, batch)


def rejoin_stash(desk: Desk, batch: ScheduleBatch) -> None:
    """The tokens go into the relay, from where they are gathered as after any forward (#25945)."""
    _upload_rows(desk, batch)
    assert batch.req_pool_indices is not None
    desk.futures.stash(batch.req_pool_indices, _last_tokens(desk, batch))


def rejoin_packed(desk: Desk, batch: ScheduleBatch) -> None:
    """Everything in one copy that does not block."""
    rows, lens, tokens = _host_rows(batch)
    arrays: list[np.ndarray[Any, Any]] = [rows, lens, tokens, lens.astype(np.int32)]
    batch.req_pool_indices, batch.seq_lens, on_device, batch.orig_seq_lens = upload(
        arrays, device=desk.device, how="packed"
    )
    _mirror(batch, rows, lens)
    desk.futures.stash(batch.req_pool_indices, on_device)


def _upload_rows(desk: Desk, batch: ScheduleBatch) -> None:
    """A blocking copy for each array, as upstream's."""
    rows, lens, _ = _host_rows(batch)
    batch.req_pool_indices = torch.tensor(rows, device=desk.device)
    batch.seq_lens = torch.tensor(lens, device=desk.device)
    batch.orig_seq_lens = torch.tensor(lens.astype(np.int32), device=desk.device)
    _mirror(batch, rows, lens)


def _last_tokens(desk: Desk, batch: ScheduleBatch) -> torch.Tensor:
    return torch.tensor(_host_rows(batch)[2], device=desk.device)


def _mirror(batch: ScheduleBatch, rows: _Array, lens: _Array) -> None:
    batch.req_pool_indices_cpu = torch.from_numpy(rows)
    batch.seq_lens_cpu = torch.from_numpy(lens.copy())


_Array = np.ndarray[tuple[int], np.dtype[np.int64]]


def _host_rows(batch: ScheduleBatch) -> tuple[_Array, _Array, _Array]:
    """Row, length and last token of each request. The last token's KV is not computed yet: it does not count."""
    rows = np.array([req.req_pool_idx for req in batch.reqs], np.int64)
    lens = np.array([req.seqlen - 1 for req in batch.reqs], np.int64)
    return rows, lens, np.array([req.output_ids[-1] for req in batch.reqs], np.int64)


def tell_by_upload(
    desk: Desk, batch: ScheduleBatch, picked: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Upload the list of requests that have something to back up: it waits for the stream (a residue of #26425)."""
    assert batch.req_pool_indices is not None and batch.seq_lens is not None
    backup_indices = torch.tensor(picked, dtype=torch.int64, device=desk.device)
    return batch.req_pool_indices[backup_indices], batch.seq_lens[backup_indices]


def tell_by_pinned_upload(
    desk: Desk, batch: ScheduleBatch, picked: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same without waiting."""
    assert batch.req_pool_indices is not None and batch.seq_lens is not None
    (backup_indices,) = upload([np.array(picked, np.int64)], device=desk.device, how="pinned")
    return batch.req_pool_indices[backup_indices], batch.seq_lens[backup_indices]


def tell_nothing(
    desk: Desk,  # noqa: ARG001
    batch: ScheduleBatch,
    picked: Sequence[int],  # noqa: ARG001
) -> tuple[torch.Tensor, torch.Tensor]:
    """All requests: the device knows itself which tokens came by staging."""
    assert batch.req_pool_indices is not None and batch.seq_lens is not None
    return batch.req_pool_indices, batch.seq_lens
