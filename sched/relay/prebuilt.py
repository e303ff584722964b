"""Policies for requests that join by a batch of their own: staged ones, with KV on the host, and those whose prompts
other workers compute; and for the transfers that bring them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from ..batch import ScheduleBatch
from ..model.upload import upload
from .context import RelayContext

# ---- staged requests ----------------------------------------------------------------------------------------


def rejoin_output(context: RelayContext, batch: ScheduleBatch) -> None:
    """Upload the last tokens as the bridge (before #25774)."""
    batch.output_ids = _upload_rows(context, batch)


def rejoin_input(context: RelayContext, batch: ScheduleBatch) -> None:
    """The same, as the next input (#25774)."""
    batch.input_ids = _upload_rows(context, batch)


def rejoin_stash(context: RelayContext, batch: ScheduleBatch) -> None:
    """Stash the tokens, which are gathered from the relay as after any forward (#25945)."""
    last_tokens = _upload_rows(context, batch)
    context.futures.stash(batch.req_pool_indices, last_tokens)


def rejoin_packed(context: RelayContext, batch: ScheduleBatch) -> None:
    """Everything in one copy that does not block."""
    rows, lens, tokens = _host_rows(batch)
    arrays: list[np.ndarray[Any, Any]] = [rows, lens, tokens, lens.astype(np.int32)]
    batch.req_pool_indices, batch.seq_lens, on_device, batch.orig_seq_lens = upload(
        arrays, device=context.device, how="packed"
    )
    _mirror(batch, rows, lens)
    context.futures.stash(batch.req_pool_indices, on_device)


def _upload_rows(context: RelayContext, batch: ScheduleBatch) -> torch.Tensor:
    """A blocking copy for each array, as upstream's. Returns the last tokens."""
    rows, lens, tokens = _host_rows(batch)
    batch.req_pool_indices = torch.tensor(rows, device=context.device)
    batch.seq_lens = torch.tensor(lens, device=context.device)
    batch.orig_seq_lens = torch.tensor(lens.astype(np.int32), device=context.device)
    _mirror(batch, rows, lens)
    return torch.tensor(tokens, device=context.device)


def _mirror(batch: ScheduleBatch, rows: _Array, lens: _Array) -> None:
    batch.req_pool_indices_cpu = torch.from_numpy(rows)
    batch.seq_lens_cpu = torch.from_numpy(lens)


_Array: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"


def _host_rows(batch: ScheduleBatch) -> tuple[_Array, _Array, _Array]:
    """Row, length and last token of each request. The length excludes the last token, whose KV is not computed yet."""
    rows = np.array([req.req_pool_idx for req in batch.reqs], np.int64)
    lens = np.array([req.seqlen - 1 for req in batch.reqs], np.int64)
    return rows, lens, np.array([req.output_ids[-1] for req in batch.reqs], np.int64)


def upload_indices(context: RelayContext, picked: Sequence[int]) -> torch.Tensor:
    """Upload a list, for which the host waits (unchanged by #26425)."""
    return torch.tensor(picked, dtype=torch.int64, device=context.device)


def upload_indices_pinned(context: RelayContext, picked: Sequence[int]) -> torch.Tensor:
    """Upload without waiting."""
    (indices,) = upload([np.array(picked, np.int64)], device=context.device, how="pinned")
    return indices


def no_indices(context: RelayContext, picked: Sequence[int]) -> None:
    """Upload nothing: the device itself leaves out the tokens that came by staging."""


# ---- prompts of other workers -------------------------------------------------------------------------------


def prebuild_output(context: RelayContext, batch: ScheduleBatch) -> None:
    """The first tokens are the bridge (before #25774)."""
    _upload_prompts(context, batch)
    rejoin_output(context, batch)


def prebuild_input(context: RelayContext, batch: ScheduleBatch) -> None:
    """The same, as the next input (#25774)."""
    _upload_prompts(context, batch)
    rejoin_input(context, batch)


def prebuild_publishing(context: RelayContext, batch: ScheduleBatch) -> None:
    """Publish the lengths, which a decode takes from the relay and no forward of this worker has published (#25944)."""
    prebuild_input(context, batch)
    assert batch.input_ids is not None
    context.futures.publish(batch.req_pool_indices, batch.seq_lens + 1)
    context.futures.stash(batch.req_pool_indices, batch.input_ids)


def prebuild_stash(context: RelayContext, batch: ScheduleBatch) -> None:
    """The tokens go into the relay (#25945)."""
    _upload_prompts(context, batch)
    rejoin_stash(context, batch)


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


def when_sent(context: RelayContext, gone: Any) -> bool:
    """The pages may be freed once the event ``gone`` has happened."""
    left: bool = gone.query()
    return left
