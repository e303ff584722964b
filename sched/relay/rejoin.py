"""How requests that were staged come back as a batch of their own (``bootstrap``), and how the device learns which
of a batch have a token to back up (``backup_indices``). Only with KV on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ..batch import ScheduleBatch
from ..model.upload import upload
from .context import RelayContext

Bootstrap = Callable[[RelayContext, ScheduleBatch], None]


def rejoin_output(context: RelayContext, batch: ScheduleBatch) -> None:
    """The last tokens are the bridge, as the host knows them (before #25774)."""
    _upload_rows(context, batch)
    batch.output_ids = _last_tokens(context, batch)


def rejoin_input(context: RelayContext, batch: ScheduleBatch) -> None:
    """The same, as the next input (#25774)."""
    _upload_rows(context, batch)
    batch.input_ids = _last_tokens(context, batch)


def rejoin_stash(context: RelayContext, batch: ScheduleBatch) -> None:
    """The tokens go into the relay, from where they are gathered as after any forward (#25945)."""
    _upload_rows(context, batch)
    context.futures.stash(batch.req_pool_indices, _last_tokens(context, batch))


def rejoin_packed(context: RelayContext, batch: ScheduleBatch) -> None:
    """Everything in one copy that does not block."""
    rows, lens, tokens = _host_rows(batch)
    arrays: list[np.ndarray[Any, Any]] = [rows, lens, tokens, lens.astype(np.int32)]
    batch.req_pool_indices, batch.seq_lens, on_device, batch.orig_seq_lens = upload(
        arrays, device=context.device, how="packed"
    )
    _mirror(batch, rows, lens)
    context.futures.stash(batch.req_pool_indices, on_device)


def _upload_rows(context: RelayContext, batch: ScheduleBatch) -> None:
    """A blocking copy for each array, as upstream's."""
    rows, lens, _ = _host_rows(batch)
    batch.req_pool_indices = torch.tensor(rows, device=context.device)
    batch.seq_lens = torch.tensor(lens, device=context.device)
    batch.orig_seq_lens = torch.tensor(lens.astype(np.int32), device=context.device)
    _mirror(batch, rows, lens)


def _last_tokens(context: RelayContext, batch: ScheduleBatch) -> torch.Tensor:
    return torch.tensor(_host_rows(batch)[2], device=context.device)


def _mirror(batch: ScheduleBatch, rows: _Array, lens: _Array) -> None:
    batch.req_pool_indices_cpu = torch.from_numpy(rows)
    batch.seq_lens_cpu = torch.from_numpy(lens.copy())


_Array = np.ndarray[tuple[int], np.dtype[np.int64]]


def _host_rows(batch: ScheduleBatch) -> tuple[_Array, _Array, _Array]:
    """Row, length and last token of each request. The last token's KV is not computed yet: it does not count."""
    rows = np.array([req.req_pool_idx for req in batch.reqs], np.int64)
    lens = np.array([req.seqlen - 1 for req in batch.reqs], np.int64)
    return rows, lens, np.array([req.output_ids[-1] for req in batch.reqs], np.int64)


def name_by_upload(context: RelayContext, picked: Sequence[int]) -> torch.Tensor:
    """A list on its way to the device, for which the host waits (what #26425 left)."""
    return torch.tensor(picked, dtype=torch.int64, device=context.device)


def name_by_pinned_upload(context: RelayContext, picked: Sequence[int]) -> torch.Tensor:
    """The same without waiting."""
    (indices,) = upload([np.array(picked, np.int64)], device=context.device, how="pinned")
    return indices


def name_nobody(context: RelayContext, picked: Sequence[int]) -> None:
    """The device knows itself which tokens came by staging, and leaves those out."""
