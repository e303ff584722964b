"""The names of the relay's states, switches and faults, apart from their policies, which import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

SWITCH_VALUES: Final[Mapping[str, tuple[str, ...]]] = {
    "barrier": ("off", "top", "after-launch", "read-done"),
    "flatten": ("list", "numpy"),
    "staging": ("pinned", "pageable"),
    "sampling_tensors": ("pageable", "pinned", "packed"),
    "index": ("ring", "pool"),
    "dead_publish": ("on", "off"),
    "penalties": ("upstream", "exact"),
    "backup_indices": ("blocking", "pinned", "none"),
    "preparation": ("split", "fused"),
    "seq_lens_cpu": ("blocking", "private", "bound"),
}

SWITCHES: Final[Mapping[str, str]] = {
    "barrier": "What orders the schedule's writes after a forward's reads: nothing; the whole forward, waited for at "
    "the loop's top (#26380) or right after the launch; an event behind the forward's copy of its page-table rows.",
    "flatten": "How a prompt's tokens become one array (#25098).",
    "staging": "The memory that the prompt is copied from.",
    "sampling_tensors": "Five blocking copies, five asynchronous ones, or one.",
    "index": "Where tokens wait for the next step (#25862); states after the ring refuse it.",
    "dead_publish": "Whether lengths are published that are not read since #26020.",
    "penalties": "Of the last token that the host knows, or of every token, counted on the device.",
    "backup_indices": "With KV on the host: how the device learns which requests have something to back up "
    "(hisparse.md).",
    "preparation": "A copy per array and a kernel per part, or one upload and one kernel.",
    "seq_lens_cpu": "How the host learns the lengths that a verify leaves, under speculation v2: a blocking copy; a "
    "pinned one on a stream of its own, for which the host waits (#26380); not at all, for it knows how far slots "
    "reach (#26128).",
}

STATE_NAMES: Final = (
    *("pr25774-before", "pr25774", "pr25944-before", "pr25944", "pr26020", "pr26425-before", "pr26425"),
    *("pr25945-before", "pr25945", "latest"),
)
ALIASES: Final[Mapping[str, str]] = {"pr26020-before": "pr25944"}

FAULT_NAMES: Final = (
    *("one-sided-merge", "penalties-from-input", "allocate-by-sentinel", "mix-with-sentinel"),
    *("hot-buffer-by-sentinel", "resolve-ids-first", "prebuilt-unpublished", "pd-freed-block-race"),
    *("pd-overwritten-page", "rejoin-without-mirror", "never-resolve", "embedding-never-resolves"),
    *("encoder-rebuilt-on-device", "list-for-the-bridge", "deferred-never-resolves", "no-barrier"),
    *("small-ring", "negative-ids-replaced", "nothing-kept-alive", "one-launch-kept-alive"),
    *("staging-refilled", "gather-without-stash", "emptied-batch-merged", "stash-before-sampling"),
    *("advance-in-place", "dead-publish", "isolation-restores-staging", "publish-ready-overwritten"),
    *("worker-extras-not-kept", "accepted-tokens-stashed", "missing-host-lengths-used"),
    *("draft-extends-lengths", "stage-without-stash", "stage-tokens-unawaited", "onebatch-never-resolves"),
    *("onebatch-penalises-the-prompt", "idle-rows-stashed"),
)
