"""The rows of speculative workers: each state as its changes to the one before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from . import draft_lengths as lengths
from . import draft_prebuilt, drafts, isolation
from .draft_row import DraftRow
from .switches import Policies

# The serial worker's states differ only in where ids are kept between steps and in how a prompt is rotated.
V1_OUTPUT_IDS = DraftRow(
    rows_wait=lengths.nothing_to_do,
    prepare_lengths=lengths.nothing_to_do,
    ends="blocking",
    host_lengths=lengths.nothing_to_do,
    isolated=isolation.sampling_isolated,
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
    seed=draft_prebuilt.seed_batch,
)
V1_INPUT_IDS = replace(V1_OUTPUT_IDS, conclude=drafts.conclude_in_input_ids)
# #25819
V1_ROTATING = replace(V1_INPUT_IDS, rotate=drafts.rotate_by_uploaded_lens)
V1_LATEST = replace(
    V1_ROTATING,
    rotate=drafts.rotate_along_the_prompt,
    prompt_lens=lengths.prompt_lens_shared,
    extend_lens=lengths.lens_packed,
    seed=draft_prebuilt.seed_batch_packed,
)

V2_EVENT = replace(
    V1_OUTPUT_IDS,
    rows_wait=lengths.wait_verify_done,
    prepare_lengths=lengths.lengths_downloaded_early,
    isolated=isolation.fields_isolated,
    resolve=drafts.resolve_extras,
    publish=lengths.mark_verified,
    stash=drafts.stash_interval,
    conclude=drafts.conclude_with_event,
    filter=drafts.filter_future,
    merge=drafts.merge_future,
    seed=draft_prebuilt.seed_relay,
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
    seed=draft_prebuilt.seed_relay_packed,
)

# Switches of the overlapped worker.
DRAFT_SWITCHES: Mapping[str, Mapping[str, Policies]] = {
    "seq_lens_cpu": {
        "blocking": {
            "host_lengths": lengths.lengths_gathered_and_downloaded,
            "publish": lengths.publish_lengths,
            "step_lens": lengths.step_lens_uploaded,
        },
        "private": {
            "host_lengths": lengths.lengths_by_private_stream,
            "publish": lengths.publish_lengths,
            "step_lens": lengths.step_lens_uploaded,
        },
        "bound": {
            "host_lengths": lengths.lengths_bounded,
            "publish": lengths.publish_lengths,
            "step_lens": lengths.step_lens_made_on_device,
        },
    },
}
