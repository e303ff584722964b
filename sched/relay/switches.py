"""Switches for effects between the states of the ladder, so that no state is credited with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import futures, lengths, ordering, pages, penalties, placeholders, prebuilt, prompt, tokens

Policies = Mapping[str, Any]
"""Questions of a row and the policies that replace the row's."""

_NO_BARRIER: Policies = {
    "barrier": ordering.no_barrier,
    "reads_done": ordering.nothing,
    "pages": pages.shared_pages,
    "read_tables": ordering.nothing,
}
_READ_DONE: Policies = {
    "reads_done": ordering.wait_until_read,
    "pages": pages.own_pages,
    "read_tables": pages.copy_tables,
}

SWITCHES: Mapping[str, Mapping[str, Policies]] = {
    "barrier": {
        "off": _NO_BARRIER,
        "top": {**_NO_BARRIER, "barrier": ordering.barrier_at_top},
        "after-launch": {**_NO_BARRIER, "reads_done": ordering.barrier_after_launch},
        "read-done": {**_NO_BARRIER, **_READ_DONE},
    },
    "flatten": {
        "list": {"flatten": prompt.flatten_list},
        "numpy": {"flatten": prompt.flatten_numpy},
    },
    "staging": {
        "pinned": {"staging": prompt.pinned},
        "pageable": {"staging": prompt.pageable},
    },
    "sampling_tensors": {
        "pageable": {"sampling_tensors": "pageable"},
        "pinned": {"sampling_tensors": "pinned"},
        "packed": {"sampling_tensors": "packed"},
    },
    "index": {
        "ring": {
            "futures": futures.ringed,
            "open": placeholders.open_ring,
            "stash": placeholders.stash_interval,
        },
        "pool": {"futures": futures.pooled, "open": tokens.open_rows, "stash": tokens.stash_by_row},
    },
    "dead_publish": {
        "on": {"publish": tokens.publish_next_lengths},
        "off": {"publish": ordering.nothing},
    },
    "penalties": {
        "upstream": {"penalty_tokens": penalties.from_requests},
        "exact": {"penalty_tokens": penalties.AfterSampling},
    },
    "backup_indices": {
        "blocking": {"backup_indices": prebuilt.upload_indices},
        "pinned": {"backup_indices": prebuilt.upload_indices_pinned},
        "none": {"backup_indices": prebuilt.no_indices},
    },
    "preparation": {
        "split": {"preparation": "split"},
        "fused": {"preparation": "fused"},
    },
}

# Switches about streams and overlap, which have no effect in a loop with a single stream.
OVERLAPPED_ONLY = frozenset({"barrier", "index", "dead_publish"})

# Switches of the overlapped speculative worker.
DRAFT_SWITCHES: Mapping[str, Mapping[str, Policies]] = {
    "seq_lens_cpu": {
        name: {
            "host_lengths": host_lengths,
            "publish": lengths.publish_lengths,
            "step_lens": step_lens,
        }
        for name, host_lengths, step_lens in (
            ("blocking", lengths.lengths_gathered_and_downloaded, lengths.step_lens_uploaded),
            ("private", lengths.lengths_by_private_stream, lengths.step_lens_uploaded),
            ("bound", lengths.lengths_bounded, lengths.step_lens_made_on_device),
        )
    },
}
