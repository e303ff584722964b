"""Races and defects of upstream's states, as results declare them."""

from __future__ import annotations

NEGATIVE_IDS = "negative ids: a prompt's id below zero is taken for a placeholder and replaced"
ONE_SIDED_MERGE = "one-sided merge: a side without token ids fails, or loses the other side's"
STAGED_LATE = "mixed steps: mix_running_indices is freed before the forward stream has gathered with it"
SLOT_REUSE = "slot reuse: a row or KV slot freed while a forward reads it is written by its next owner"
PAGE_TABLE_REWRITE = (
    "page-table rewrite: settling replaces a row's slots by the cache's while a forward reads the row"
)
PENALTY_STATE = "penalty state: the schedule counts tokens into what a forward reads its penalties from"
DRAFT_LENGTHS = (
    "draft lengths: the schedule filters lengths that a speculative forward gathers on its own stream"
)
CHUNK_REWRITE = (
    "chunk rewrite: a prompt's next chunk rewrites its row while another stage's batch still reads it"
)
ROUND_TRIP = (
    "round trip: tokens that came round are freed by the schedule before its own reads of them have run"
)
DEAD_STASH = "dead stash: every step stores tokens that only mixed steps read"
DEAD_PUBLISH = "dead publish: every step publishes lengths that are never read"
