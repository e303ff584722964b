"""The states of the ladder, one row of policies per loop and worker, each as what it changes in the row before.

A state mirrors an upstream commit with its costs and defects; ``latest`` holds our own improvements. Switches are for
effects between the states, so that no state is credited with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import context, drafts, lengths, ordering, penalties, prebuilt, tokens
from .row import DraftRow, RelayRow, Speculation


def serial_with_relay(row: RelayRow) -> RelayRow:
    """The state in the serial loop: one stream, and no forward in flight during schedule work."""
    return replace(
        row,
        pages=ordering.shared_pages,
        barrier=ordering.no_barrier,
        isolate=ordering.resolve_in_place,
        read_tables=ordering.nothing,
        advance=lengths.advance_in_place,
        publish=ordering.nothing,
        keep_alive=ordering.keep_nothing,
        reads_done=ordering.nothing,
    )


def unstaged(row: RelayRow) -> RelayRow:
    """A pipeline's stage uses the serial row unchanged."""
    return row


def staged_twice(row: RelayRow) -> RelayRow:
    """Stash the pipeline's tokens for decodes of mixed steps, and keep them in the batch for all others."""
    return replace(row, conclude=tokens.conclude_input_ids)


def staged_in_order(row: RelayRow) -> RelayRow:
    """Rewrite a chunk's row only after the forwards in flight have read it."""
    return replace(row, barrier=ordering.barrier_at_top)


def serial_without_relay(row: RelayRow) -> RelayRow:
    """Before #25945 the serial loop has no relay: the last step's tokens stay in the batch."""
    return replace(
        serial_with_relay(row),
        futures=context.pooled,
        open=tokens.open_rows,
        resolve=ordering.nothing,
        stash=tokens.stash_nothing,
        allocation_lengths=lengths.allocate_by_batch_lengths,
        buffer_lengths=lengths.lengths_of_batch,
        penalty_tokens=penalties.from_input,
        mix=tokens.mix_twice,
        conclude=tokens.conclude_input_ids,
        prebuild=prebuilt.prebuild_input,
    )


def serial_with_output_ids(row: RelayRow) -> RelayRow:
    """Before #25774 the tokens stay in a field of their own."""
    return replace(
        serial_without_relay(row),
        penalty_tokens=penalties.from_output,
        mix=tokens.mix_once,
        conclude=tokens.conclude_output_ids,
        prebuild=prebuilt.prebuild_output,
    )


def serial_with_v2(row: RelayRow) -> RelayRow:
    """The overlapped speculative worker in the serial loop."""
    return replace(serial_with_relay(row), isolate=ordering.isolate_in_place)


def speculating(row: RelayRow, mode: Speculation) -> RelayRow:
    """The changes for a speculative worker: the batch has no input field, and upstream's penalties count the bonus, on
    the device where that is possible."""
    if row.penalty_tokens is not penalties.AfterSampling:
        latest = {"v1": penalties.from_bonus, "v2": penalties.from_requests}[mode]
        row = replace(row, penalty_tokens=latest)
    if row.prebuild is prebuilt.prebuild_publishing:  # the worker publishes itself
        row = replace(row, prebuild=prebuilt.prebuild_input)
    return replace(row, prepare_input=ordering.nothing, publish=ordering.nothing)


PR25774_BEFORE = RelayRow(
    futures=context.ringed,
    pages=ordering.shared_pages,
    barrier=ordering.no_barrier,
    flatten=tokens.flatten_list,
    staging=tokens.pinned,
    stage_prompt=tokens.upload_now,
    rebuild_prompt=tokens.upload_now,
    preparation="split",
    prepare_input=tokens.cast_output,
    advance=lengths.advance_new_tensor,
    penalty_tokens=penalties.from_requests,
    sampling_tensors="pageable",
    allocation_lengths=lengths.allocate_by_batch_lengths,
    mix=tokens.mix_once,
    open=tokens.open_ring,
    host_lengths=lengths.lengths_mirrored,
    host_indices=lengths.indices_downloaded,
    isolate=ordering.isolate_then_resolve,
    resolve=tokens.resolve_placeholders,
    resolve_prompt=ordering.nothing,
    read_tables=ordering.nothing,
    publish=ordering.nothing,
    stash=tokens.stash_interval,
    keep_alive=ordering.keep_in_ring,
    reads_done=ordering.nothing,
    conclude=tokens.conclude_output,
    conclude_blocks=tokens.keep_list,
    await_tokens=ordering.host_waits,
    filter=tokens.filter_output_summing,
    joins=tokens.join_if_any,
    merge=tokens.merge_output_one_sided,
    bootstrap=prebuilt.rejoin_output,
    prebuild=prebuilt.prebuild_output,
    before_transfer=prebuilt.wait_for_all_streams,
    has_left=prebuilt.when_sent,
    buffer_lengths=lengths.lengths_of_batch,
    backup_indices=prebuilt.upload_indices,
)

PR25774 = replace(
    PR25774_BEFORE,
    prepare_input=ordering.nothing,
    mix=tokens.mix_twice,
    conclude=tokens.conclude_input,
    conclude_blocks=tokens.leave_list,
    filter=tokens.filter_input_summing,
    merge=tokens.merge_input_one_sided,
    bootstrap=prebuilt.rejoin_input,
    prebuild=prebuilt.prebuild_input,
)

# #25818, #25862, #25879, #25922 lie between.
PR25944_BEFORE = replace(
    PR25774,
    futures=context.pooled,
    open=tokens.open_rows,
    stash=tokens.stash_by_row,
    filter=tokens.filter_input,
)

PR25944 = replace(
    PR25944_BEFORE,
    advance=lengths.advance_host_side,
    allocation_lengths=lengths.allocate_by_mirror,
    mix=tokens.mix_restoring_lengths,
    resolve=tokens.resolve_lengths_too,
    buffer_lengths=lengths.lengths_from_mirror,
    publish=tokens.publish_next_lengths,
    conclude=tokens.conclude_both,
    prebuild=prebuilt.prebuild_publishing,
)

PR26020 = replace(
    PR25944,
    buffer_lengths=lengths.lengths_of_batch,
    advance=lengths.advance_new_tensor,
    allocation_lengths=lengths.allocate_by_batch_lengths,
    mix=tokens.mix_twice,
    resolve=tokens.resolve_placeholders,
    conclude=tokens.conclude_input,
    prebuild=prebuilt.prebuild_input,
)

# #25098 lies between.
PR26425_BEFORE = replace(PR26020, flatten=tokens.flatten_numpy)

PR26425 = replace(PR26425_BEFORE, host_indices=lengths.indices_mirrored)

# #26380 lies between.
PR25945_BEFORE = replace(PR26425, barrier=ordering.barrier_at_top)

PR25945 = replace(
    PR25945_BEFORE,
    stage_prompt=tokens.keep_staged,
    rebuild_prompt=tokens.keep_staged,
    mix=tokens.mix_by_index,
    isolate=ordering.resolve_then_isolate,
    resolve=tokens.resolve_late,
    resolve_prompt=tokens.resolve_late,
    conclude=tokens.drop_input,
    merge=tokens.merge_input_two_sided,
    bootstrap=prebuilt.rejoin_stash,
    prebuild=prebuilt.prebuild_stash,
)

LATEST = replace(
    PR25945,
    pages=ordering.own_pages,
    barrier=ordering.no_barrier,
    stage_prompt=tokens.upload_now,
    rebuild_prompt=tokens.upload_now,
    preparation="fused",
    penalty_tokens=penalties.AfterSampling,
    sampling_tensors="packed",
    resolve=tokens.resolve_fused,
    resolve_prompt=ordering.nothing,
    read_tables=ordering.copy_prompt_tables,
    publish=ordering.nothing,
    reads_done=ordering.wait_until_read,
    bootstrap=prebuilt.rejoin_packed,
    prebuild=prebuilt.rejoin_packed,
    backup_indices=prebuilt.no_indices,
)

# ---- speculative workers ------------------------------------------------------------------------------------

# The serial worker's states differ only in where ids are kept between steps and in how a prompt is rotated.
V1_OUTPUT_IDS = DraftRow(
    rows_wait=lengths.nothing_to_do,
    prepare_lengths=lengths.nothing_to_do,
    ends="blocking",
    host_lengths=lengths.nothing_to_do,
    isolated=context.sampling_isolated,
    resolve=drafts.resolve_nothing,
    rotate=drafts.rotate_one_by_one,
    prompt_lens=lengths.prompt_lens_uploaded,
    extend_lens=lengths.lens_uploaded,
    publish=lengths.nothing_to_publish,
    step_lens=lengths.step_lens_uploaded,
    draft_lengths=lengths.draft_lengths_in_the_batch,
    stash=drafts.stash_nothing,
    conclude=drafts.conclude_in_output_ids,
    filter=drafts.filter_draft,
    merge=drafts.merge_draft,
    seed=drafts.seed_batch,
)
V1_INPUT_IDS = replace(V1_OUTPUT_IDS, conclude=drafts.conclude_in_input_ids)
# #25819
V1_ROTATING = replace(V1_INPUT_IDS, rotate=drafts.rotate_by_uploaded_lens)
V1_LATEST = replace(
    V1_ROTATING,
    rotate=drafts.rotate_along_the_prompt,
    prompt_lens=lengths.prompt_lens_shared,
    extend_lens=lengths.lens_packed,
    seed=drafts.seed_batch_packed,
)

V2_EVENT = replace(
    V1_OUTPUT_IDS,
    rows_wait=lengths.wait_verify_done,
    prepare_lengths=lengths.lengths_downloaded_early,
    isolated=context.fields_isolated,
    resolve=drafts.resolve_extras,
    publish=lengths.mark_verified,
    stash=drafts.stash_interval,
    conclude=drafts.conclude_with_event,
    filter=drafts.filter_future,
    merge=drafts.merge_future,
    seed=drafts.seed_relay,
)
# #25879
V2_SENTINEL = replace(
    V2_EVENT,
    rows_wait=lengths.nothing_to_do,
    prepare_lengths=lengths.nothing_to_do,
    host_lengths=lengths.lengths_downloaded,
    resolve=drafts.resolve_lengths_and_extras,
    publish=lengths.publish_lengths,
    stash=drafts.stash_by_row,
    conclude=drafts.conclude_with_sentinel,
)
# #26020
V2_PAIR = replace(
    V2_SENTINEL,
    host_lengths=lengths.lengths_gathered_and_downloaded,
    resolve=drafts.resolve_extras,
    draft_lengths=lengths.draft_lengths_of_the_forward,
    conclude=drafts.conclude_by_row,
)
# #26380
V2_PRIVATE = replace(V2_PAIR, ends="asynchronous", host_lengths=lengths.lengths_by_private_stream)
# #25945
V2_STAGED = replace(V2_PRIVATE, resolve=drafts.resolve_staged_and_extras)
V2_LATEST = replace(
    V2_STAGED,
    ends="packed",
    host_lengths=lengths.lengths_left_on_the_device,
    resolve=drafts.resolve_on_the_forward_stream,
    rotate=drafts.rotate_along_the_prompt,
    prompt_lens=lengths.prompt_lens_shared,
    publish=lengths.publish_for_forwards,
    step_lens=lengths.step_lens_made_on_device,
    seed=drafts.seed_relay_packed,
)

# ---- switches -----------------------------------------------------------------------------------------------

Policies = Mapping[str, Any]
"""Questions of a row and the policies that replace the row's."""

_NO_BARRIER: Policies = {
    "barrier": ordering.no_barrier,
    "reads_done": ordering.nothing,
    "pages": ordering.shared_pages,
    "read_tables": ordering.nothing,
}


def _of(question: str, **policies: Any) -> Mapping[str, Policies]:
    """The values of a switch about one question."""
    return {value: {question: policy} for value, policy in policies.items()}


SWITCHES: Mapping[str, Mapping[str, Policies]] = {
    "barrier": {
        "off": _NO_BARRIER,
        "top": {**_NO_BARRIER, "barrier": ordering.barrier_at_top},
        "after-launch": {**_NO_BARRIER, "reads_done": ordering.barrier_after_launch},
        "read-done": {
            "barrier": ordering.no_barrier,
            "reads_done": ordering.wait_until_read,
            "pages": ordering.own_pages,
            "read_tables": ordering.copy_tables,
        },
    },
    "flatten": _of("flatten", list=tokens.flatten_list, numpy=tokens.flatten_numpy),
    "staging": _of("staging", pinned=tokens.pinned, pageable=tokens.pageable),
    "sampling_tensors": _of("sampling_tensors", pageable="pageable", pinned="pinned", packed="packed"),
    "index": {
        "ring": {"futures": context.ringed, "open": tokens.open_ring, "stash": tokens.stash_interval},
        "pool": {"futures": context.pooled, "open": tokens.open_rows, "stash": tokens.stash_by_row},
    },
    "dead_publish": _of("publish", on=tokens.publish_next_lengths, off=ordering.nothing),
    "penalties": _of("penalty_tokens", upstream=penalties.from_requests, exact=penalties.AfterSampling),
    "backup_indices": _of(
        "backup_indices",
        blocking=prebuilt.upload_indices,
        pinned=prebuilt.upload_indices_pinned,
        none=prebuilt.no_indices,
    ),
    "preparation": _of("preparation", split="split", fused="fused"),
}

# Switches about streams and overlap, which have no effect in a loop with a single stream.
OVERLAPPED_ONLY = frozenset({"barrier", "index", "dead_publish"})

# Switches of the overlapped speculative worker.
DRAFT_SWITCHES: Mapping[str, Mapping[str, Policies]] = {
    "seq_lens_cpu": {
        name: {"host_lengths": host_lengths, "publish": lengths.publish_lengths, "step_lens": step_lens}
        for name, host_lengths, step_lens in (
            ("blocking", lengths.lengths_gathered_and_downloaded, lengths.step_lens_uploaded),
            ("private", lengths.lengths_by_private_stream, lengths.step_lens_uploaded),
            ("bound", lengths.lengths_bounded, lengths.step_lens_made_on_device),
        )
    },
}


def switch_values(row: RelayRow, drafts: DraftRow) -> Mapping[str, str]:
    """How a state's rows are switched."""
    return {
        name: _closest(of, values)
        for of, switches in ((row, SWITCHES), (drafts, DRAFT_SWITCHES))
        for name, values in switches.items()
    }


def _closest(row: RelayRow | DraftRow, values: Mapping[str, Policies]) -> str:
    """The value, or the first of several, that sets most of its questions as the row has them: ``latest`` has some
    policies of its own."""

    def agreement(value: str) -> int:
        return sum(getattr(row, question) == policy for question, policy in values[value].items())

    return max(values, key=agreement)
