"""How a draft's input is handed to the next step, also when rows leave or join."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..batch import DraftFuture, DraftInput, DraftState, FutureIndices, ScheduleBatch, StepResult
from ..kernels import drafts as draft_kernels
from ..kernels import rows as row_kernels
from ..model.upload import Upload, upload
from .context import RelayContext, Step
from .ordering import copy_rows_ahead
from .row import DraftRelay

# ---- resolve ---------------------------------------------------------------------------------------------------


def resolve_extras(context: RelayContext, prompts: Step, batch: ScheduleBatch) -> None:
    """Resolve a prompt as without speculation, and gather the draft's input of a decode from the FutureMap."""
    if batch.forward_mode.is_extend:
        prompts(batch)
    _gather_draft(context, batch)


def resolve_lengths_and_extras(context: RelayContext, prompts: Step, batch: ScheduleBatch) -> None:
    """Gather the lengths too, since between steps the batch's own are sentinels (#25879 to #26020)."""
    future = batch.spec_info
    if isinstance(future, DraftFuture):
        batch.seq_lens = context.futures.new_seq_lens_buf[future.future_indices.indices]
        row_kernels.assert_all((batch.seq_lens > 0).all())
    resolve_extras(context, prompts, batch)


def resolve_staged_and_extras(context: RelayContext, prompts: Step, batch: ScheduleBatch) -> None:
    """Upload a staged prompt if there is one (#25945), and gather the draft's input."""
    if batch.prefill_input_ids_cpu is not None:
        prompts(batch)
    _gather_draft(context, batch)


def resolve_on_the_forward_stream(context: RelayContext, prompts: Step, batch: ScheduleBatch) -> None:
    """Gather a decode's lengths and draft input, and copy the rows of the page table that the step reads."""
    if not batch.forward_mode.is_decode:
        prompts(batch)
        return
    batch.seq_lens = context.futures.new_seq_lens_buf[batch.draft_future.future_indices.indices]
    _gather_draft(context, batch)
    if context.pages is not context.req_to_token:
        copy_rows_ahead(context, batch)


def _gather_draft(context: RelayContext, batch: ScheduleBatch) -> None:
    future = batch.spec_info
    if not isinstance(future, DraftFuture):
        return
    at = future.future_indices.indices
    context.streams.record(at, context.streams.forward)
    assert context.draft_buffers is not None, "a draft's input is gathered before one was stashed"
    bonus = context.futures.output_tokens_buf[at]
    state = DraftState(*(buffer[at] for buffer in context.draft_buffers))
    batch.spec_info = DraftInput(bonus, state, gathered_from=future)


def resolve_nothing(context: RelayContext, prompts: Step, batch: ScheduleBatch) -> None:
    """Resolve prompts alone: the serial worker's batch carries the draft's input."""
    if batch.forward_mode.is_extend:
        prompts(batch)


# ---- the draft's prompt ----------------------------------------------------------------------------------------


def rotate_one_by_one(
    context: RelayContext, batch: ScheduleBatch, next_ids: torch.Tensor, extend_lens: torch.Tensor
) -> torch.Tensor:
    """Rotate each request's ids in place by a cat of its own, as upstream's v2 always does."""
    assert batch.input_ids is not None
    start = 0
    for i, length in enumerate(batch.extend_lens):
        own = batch.input_ids[start : start + length]
        own.copy_(torch.cat([own[1:], next_ids[i : i + 1]]))
        start += length
    return batch.input_ids


def rotate_by_uploaded_lens(
    context: RelayContext, batch: ScheduleBatch, next_ids: torch.Tensor, extend_lens: torch.Tensor
) -> torch.Tensor:
    """Rotate all ids at once, by lengths that are uploaded for it (#25819)."""
    lens = torch.tensor(batch.extend_lens, device=context.device)
    rotated: torch.Tensor = draft_kernels.rotate_ids(batch.input_ids, next_ids, lens)
    return rotated


def rotate_along_the_prompt(
    context: RelayContext, batch: ScheduleBatch, next_ids: torch.Tensor, extend_lens: torch.Tensor
) -> torch.Tensor:
    """Rotate all ids at once, by the lengths of the target's forward. An unfinished prompt is followed by its own next
    token; the other policies use the token that was sampled there, which the scheduler throws away."""
    rotated: torch.Tensor = draft_kernels.rotate_ids(batch.input_ids, next_ids, extend_lens)
    req = batch.chunked_req
    if req is not None:
        last = sum(batch.extend_lens[: batch.reqs.index(req) + 1])
        rotated[last - 1 : last].fill_(req.tokens(req.fill_len, req.fill_len + 1)[0])
    return rotated


# ---- stash and conclude ----------------------------------------------------------------------------------------


def stash_interval(context: RelayContext, future: FutureIndices, draft: DraftInput) -> None:
    """Store in the ring's consecutive slots."""
    assert future.interval is not None
    if draft.bonus_tokens.shape[0]:
        context.futures.output_tokens_buf[future.interval] = draft.bonus_tokens
        context.store_draft(future.interval, draft.state)


def stash_by_row(context: RelayContext, future: FutureIndices, draft: DraftInput) -> None:
    """Store in the requests' own rows (#25862)."""
    if draft.bonus_tokens.shape[0]:
        context.futures.stash(future.indices, draft.bonus_tokens)
        context.store_draft(future.indices, draft.state)


def stash_nothing(context: RelayContext, future: FutureIndices, draft: DraftInput) -> None:
    """Store nothing: the serial worker's batch keeps the draft's input."""


def conclude_with_event(context: RelayContext, batch: ScheduleBatch, result: StepResult) -> None:
    """Let the batch carry the new lengths, and the event behind which they may be read."""
    made = result.next_draft_input
    batch.input_ids = None
    if made is not None and made.new_seq_lens is not None:
        batch.seq_lens = made.new_seq_lens
    batch.spec_info = DraftFuture(result.future_indices, context.publish_ready)


def conclude_with_sentinel(context: RelayContext, batch: ScheduleBatch, result: StepResult) -> None:
    """Make the lengths between steps sentinels: the negated rows (#25879)."""
    conclude_by_row(context, batch, result)
    with context.observer.range("conclude", batch.step, batch.batch_size):
        batch.seq_lens = -result.future_indices.indices


def conclude_by_row(context: RelayContext, batch: ScheduleBatch, result: StepResult) -> None:
    """Keep the lengths from before the verify until the next step's launch (#26020)."""
    batch.input_ids = None
    batch.spec_info = DraftFuture(result.future_indices)


def conclude_in_output_ids(context: RelayContext, batch: ScheduleBatch, result: StepResult) -> None:
    """v1 before #25774. After a verify the ids are all accepted tokens, not one per request; nothing reads them."""
    batch.output_ids = result.next_token_ids
    batch.spec_info = result.next_draft_input


def conclude_in_input_ids(context: RelayContext, batch: ScheduleBatch, result: StepResult) -> None:
    """v1 since #25774, and still since #25945, since ids of that shape cannot be stashed by row."""
    assert result.next_token_ids is not None
    batch.input_ids = result.next_token_ids.to(torch.int64)
    batch.spec_info = result.next_draft_input


# ---- rows leave and join ---------------------------------------------------------------------------------------


def filter_future(context: RelayContext, batch: ScheduleBatch, rows: torch.Tensor, before: int) -> None:
    """Filter the places, which are all that a batch carries between two overlapped steps."""
    own = batch.draft_future
    batch.spec_info = DraftFuture(FutureIndices(own.future_indices.indices[rows], None), own.verify_done)


def merge_future(context: RelayContext, batch: ScheduleBatch, other: ScheduleBatch) -> None:
    own, joining = batch.draft_future, other.draft_future
    indices = torch.cat([own.future_indices.indices, joining.future_indices.indices])
    done = joining.verify_done or own.verify_done  # the joining batch ran last
    batch.spec_info = DraftFuture(FutureIndices(indices, None), done)


def filter_draft(context: RelayContext, batch: ScheduleBatch, rows: torch.Tensor, before: int) -> None:
    """Filter the rows, unless the serial verify has left out requests that ended."""
    if batch.spec_info is not None and batch.draft_input.bonus_tokens.shape[0] == before:
        batch.spec_info = _joined([part[rows]] for part in _parts(batch))


def merge_draft(context: RelayContext, batch: ScheduleBatch, other: ScheduleBatch) -> None:
    if batch.spec_info is None or other.spec_info is None:  # after a serial verify that ended all of a side
        batch.spec_info = batch.spec_info or other.spec_info
        return
    batch.spec_info = _joined(zip(_parts(batch), _parts(other), strict=True))


def _joined(parts: Iterable[Sequence[torch.Tensor]]) -> DraftInput:
    """The draft input of rows of each part, in the order of ``_parts``."""
    bonus, *state = (rows[0] if len(rows) == 1 else torch.cat(tuple(rows)) for rows in parts)
    return DraftInput(bonus, DraftState(*state))


def _parts(batch: ScheduleBatch) -> tuple[torch.Tensor, ...]:
    draft = batch.draft_input
    return draft.bonus_tokens, *draft.state


# ---- prebuilt batches: a draft starts from the prefill worker's last extend, in host memory -------------------


def seed_batch(context: RelayContext, relay: DraftRelay, batch: ScheduleBatch, state: DraftState) -> None:
    """Keep it in the batch for the serial worker; a blocking copy for each part."""
    batch.spec_info = _uploaded(context, batch, state, "pageable")


def seed_batch_packed(
    context: RelayContext, relay: DraftRelay, batch: ScheduleBatch, state: DraftState
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
    # NumPy has no bfloat16.
    arrays = [(part.view(torch.int16) if part.dtype == torch.bfloat16 else part).numpy() for part in state]
    topk_p, topk_index, hidden = upload(arrays, device=context.device, how=how)
    there = DraftState(topk_p, topk_index, hidden.view(state.hidden_states.dtype))
    return DraftInput(_bonus(context, batch), there)


def _bonus(context: RelayContext, batch: ScheduleBatch) -> torch.Tensor:
    """The first tokens, from where the state keeps them."""
    if batch.output_ids is not None:
        return batch.output_ids
    if batch.input_ids is not None:
        return batch.input_ids
    return context.futures.output_tokens_buf[batch.req_pool_indices]
