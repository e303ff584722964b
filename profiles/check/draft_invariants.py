"""Invariants of drafts: a draft starts from what its request's last extend left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from ...sched.batch import DraftInput, DraftState, ForwardBatch, ScheduleBatch
from ...sched.request import Status
from ...sched.speculate.drafter import DraftRows, Tree, VerifiedChains
from ...sched.speculate.worker import DraftRunner
from .batch_invariants import Peek, Violation

LEFT = "drafts start from what the last extend left"
LENGTHS = "the host's lengths of a verify are the device's"
BOUND = "no verify reaches beyond its bound"


class DraftStart(NamedTuple):
    """What a request's draft starts from: the token at ``length``, and the draft model's output after it."""

    length: int
    bonus: int
    parts: tuple[torch.Tensor, ...]  # as in DraftState; empty where floating-point work is skipped

    def differing(self, other: DraftStart) -> list[str]:
        """The names of the fields that differ."""
        parts = zip(DraftState._fields, self.parts, other.parts, strict=False)
        apart = [name for name, own, its in parts if not torch.equal(own, its)]
        return apart if self.bonus == other.bonus else ["bonus_tokens", *apart]


# Called with the requests' starts before the drafts are made.
OnStarts = Callable[[ScheduleBatch, list[DraftStart]], None]


class DraftWatch:
    """A worker's drafter that is watched. ``launching`` returns the batch that is being launched."""

    def __init__(
        self,
        drafter: DraftRunner,
        peek: Peek,
        launching: Callable[[], ScheduleBatch],
        on_starts: OnStarts,
        report: Callable[[Iterator[Violation]], None],
    ) -> None:
        self._drafter = drafter
        self._peek = peek
        self._launching = launching
        self._on_starts = on_starts
        self._report = report
        self._left: dict[int, tuple[int, tuple[torch.Tensor, ...]]] = {}  # by row

    def draft(self, start: DraftInput, at: DraftRows) -> Tree:
        batch, peek = self._launching(), self._peek
        lens, parts = peek(at.seq_lens).tolist(), _copies(start.state, peek)
        bonus = peek(start.bonus_tokens).tolist()
        starts = [
            DraftStart(length, token, tuple(part[i] for part in parts))
            for i, (length, token) in enumerate(zip(lens, bonus, strict=True))
        ]
        self._report(_mirrored(batch, lens, at.longest))
        self._report(self._unlike(batch, peek(at.rows).tolist(), starts))
        self._on_starts(batch, starts)
        return self._drafter.draft(start, at)

    def extend(self, batch: ForwardBatch, hidden_states: torch.Tensor) -> DraftState:
        made = self._drafter.extend(batch, hidden_states)
        self._extended(batch.req_pool_indices, self._peek(batch.seq_lens).tolist(), made)
        return made

    def extend_chains(self, chains: VerifiedChains) -> DraftState:
        made = self._drafter.extend_chains(chains)
        rows, ends, _ = chains.at
        behind = chains.predict.shape[0] // rows.shape[0]
        counts = zip(self._peek(ends).tolist(), self._peek(chains.accept_lens).tolist(), strict=True)
        self._extended(rows, [end - behind + accepted for end, accepted in counts], made)
        return made

    def _extended(self, rows: torch.Tensor, lens: list[int], made: DraftState) -> None:
        """Rows [b] have KV up to ``lens`` now; the next drafts start from ``made``."""
        peek = self._peek
        parts = _copies(made, peek)
        for i, (row, length) in enumerate(zip(peek(rows).tolist(), lens, strict=True)):
            self._left[row] = length, tuple(part[i] for part in parts)

    def seeded(self, batch: ScheduleBatch, state: DraftState) -> None:
        """The results of another rank's last extend of these requests have arrived."""
        for i, req in enumerate(batch.reqs):
            assert req.req_pool_idx is not None
            self._left[req.req_pool_idx] = req.kv_committed_len, tuple(part[i] for part in state)

    def _unlike(self, batch: ScheduleBatch, rows: list[int], starts: list[DraftStart]) -> Iterator[Violation]:
        for req, row, start in zip(batch.reqs, rows, starts, strict=True):
            length, parts = self._left.get(row, (None, ()))
            if req.status is not Status.RUNNING:  # ended before the launch; its drafts are not used
                continue
            where = f"step {batch.step}, request {req.id}"
            if row != req.req_pool_idx:
                text = f"{where}: its draft starts in row {row}, and the request's is {req.req_pool_idx}"
                yield Violation(LEFT, "req_pool_indices", text)
            elif length != start.length:
                at = f"at length {start.length}, and its last extend ended at {length}"
                yield Violation(LEFT, "seq_lens", f"{where}: its draft starts {at}")
            elif len(start.parts) == len(parts):  # floating-point work is not skipped
                for name in start.differing(start._replace(parts=parts)):
                    text = f"its draft starts from {name} that its last extend did not leave"
                    yield Violation(LEFT, name, f"{where}, length {length}: {text}")


def _copies(state: DraftState, peek: Peek) -> list[torch.Tensor]:
    """Copies of the parts that have values."""
    return [part.clone() for part in map(peek, state) if part.device.type != "meta"]


def _mirrored(batch: ScheduleBatch, lens: list[int], longest: int) -> Iterator[Violation]:
    mirror = batch.seq_lens_cpu.tolist() if batch.has_host_lengths else [None] * len(lens)
    for req, length, mirrored in zip(batch.reqs, lens, mirror, strict=True):
        where = f"step {batch.step}, request {req.id}: its verify starts at length {length}"
        if mirrored is not None and mirrored != length:
            text = f"{where} on the device and {mirrored} in seq_lens_cpu"
            yield Violation(LENGTHS, "seq_lens_cpu", text)
        if length > longest:
            yield Violation(BOUND, "longest", f"{where}, and its bound is {longest}")
