"""Checks the invariants of a run from inside it: before each forward, between steps, and at the end.

Reads the device's memory in program order, without calls of the device. It cannot be combined with an adversary, which
delays the device's work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from ...sched.batch import DraftState, ForwardBatch, ModelOutput, ScheduleBatch
from ...sched.config import EngineConfig
from ...sched.link import Link
from ...sched.loop.scheduler import Scheduler
from ...sched.memory.invariants import MemoryInvariantError
from ...sched.memory.invariants import check as check_memory
from ...sched.model.decoder import Model
from ...sched.model.grammar import GrammarCache, GrammarError, GrammarState
from ...sched.observe import Observer, StepInfo
from ...sched.relay.context import RelayContext, Step
from ...sched.relay.row import DraftRelay, DraftRow, RelayRow
from ...sched.request import Request, Status
from ...sched.speculate.worker import Worker
from ..platform.machine import Machine
from .batch_invariants import (
    Forward,
    Peek,
    Token,
    Violation,
    Violations,
    checking_allocation,
    forward_violations,
    mirrors,
    row_counts,
    untouched,
)
from .draft_invariants import DraftStart, DraftWatch

PAGES_PER_STEP = 4096


class Invariants:
    """A guard of one run (see ``compose.Guard``) that collects violations and changes nothing."""

    def __init__(self, violations: Violations | None = None) -> None:
        self._violations = violations or Violations()
        self._observer: _InvariantObserver | None = None
        self._launching: tuple[ScheduleBatch, RelayContext] | None = None
        self._drafts: DraftWatch | None = None
        self._link: WatchedLink | None = None
        self._others: list[Invariants] = []  # of other ranks

    def of_rank(self, rank: int) -> Invariants:
        """The guard of a rank: this one for the first. All guards share their violations."""
        if not rank:
            return self
        self._others.append(Invariants(self._violations))
        return self._others[-1]

    def violations(self) -> Sequence[Violation]:
        """The violations of all ranks so far."""
        return self._violations.found()

    def row(self, row: RelayRow) -> RelayRow:
        """The same row; its ``isolate`` also records the batch that is launched, and the lengths by which it allocates
        are checked."""

        def isolate(
            context: RelayContext, resolve: Step, read_tables: Step, batch: ScheduleBatch
        ) -> AbstractContextManager[None]:
            self._launching = batch, context
            return self._checking_lengths(row.isolate(context, resolve, read_tables, batch), batch, context)

        checked = checking_allocation(row, self._peek, self._violations.add)
        return replace(checked, isolate=isolate)

    def draft_row(self, row: DraftRow) -> DraftRow:
        """The same row, which reports the drafts that start from another rank's last extend."""

        def seed(context: RelayContext, relay: DraftRelay, batch: ScheduleBatch, state: DraftState) -> None:
            if self._drafts is not None:
                self._drafts.seeded(batch, state)
            row.seed(context, relay, batch, state)

        return replace(row, seed=seed)

    @contextmanager
    def _checking_lengths(
        self, isolation: AbstractContextManager[None], batch: ScheduleBatch, context: RelayContext
    ) -> Iterator[None]:
        before = getattr(batch, "seq_lens_cpu", None)
        with isolation:
            yield
        spec = context.config.speculative
        if spec is not None and spec.mode == "v2":
            self._violations.add(untouched(batch, before))

    def runner(self, runner: Model) -> Model:
        """The same runner; its inputs are checked before each forward."""
        return _WatchedRunner(runner, self)

    def worker(self, worker: Worker) -> Worker:
        """The same worker; what it drafts from is checked."""
        report = self._violations.add
        self._drafts = DraftWatch(worker.drafter, self._peek, self._launched, self._drafted, report)
        return replace(worker, drafter=self._drafts)

    def link(self, link: Link) -> Link:
        """The same link; what it keeps at the end is checked."""
        self._link = WatchedLink(link)
        return self._link

    def _peek(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self._observer is not None
        return self._observer.peek(tensor)

    def _launched(self) -> ScheduleBatch:
        assert self._launching is not None
        return self._launching[0]

    def _drafted(self, batch: ScheduleBatch, starts: Sequence[DraftStart]) -> None:
        assert self._observer is not None
        self._observer.drafted(batch, starts)

    @property
    def starts(self) -> Mapping[str, Sequence[DraftStart]]:
        """What drafts of the last workload started from, verify by verify, by request that was never retracted; of all
        ranks."""
        assert self._observer is not None
        others = [entry for other in self._others for entry in other.starts.items()]
        return {**self._observer.starts, **dict(others)}

    @contextmanager
    def watching(self, scheduler: Scheduler, machine: Machine) -> Iterator[Observer]:
        """Check one workload, which runs in this block."""
        self._observer = _InvariantObserver(scheduler, machine.peek, self._violations)
        yield self._observer
        self._violations.add(self._observer.at_the_end())
        if self._link is not None:
            self._violations.add(self._link.unreleased())

    def launched(self, view: ForwardBatch) -> None:
        """Check the inputs of the forward that is about to run on ``view``."""
        assert self._launching is not None and self._observer is not None
        batch, context = self._launching
        forward = Forward(batch, view, context.config, context.pages, self._observer.peek)
        name = f"the batch of step {batch.step}"
        odd = list(row_counts(batch, name))
        self._violations.add(odd or forward_violations(forward))
        if not odd:
            self._violations.add(mirrors(batch, name, self._observer.peek, lengths=True))
            self._observer.fed(forward)


class _WatchedRunner:
    def __init__(self, runner: Model, invariants: Invariants) -> None:
        self._runner = runner
        self._invariants = invariants

    def forward(self, batch: ForwardBatch) -> ModelOutput:
        if batch.part is None or batch.part.start == 0:  # a forward's further parts have the same inputs
            self._invariants.launched(batch)
        return self._runner.forward(batch)


class _InvariantObserver(Observer):
    range_names = ("receive", "prepare")

    def __init__(self, scheduler: Scheduler, peek: Peek, violations: Violations) -> None:
        self.peek = peek
        self._scheduler = scheduler
        self._violations = violations
        # The check takes time per page: a large pool is checked at some steps only, and at the end.
        allocator = scheduler.engine.allocator
        self._stride = 1 + allocator.size // scheduler.engine.config.page_size // PAGES_PER_STEP
        self._unsettled: dict[int, StepInfo] = {}
        self._ended: Counter[str] = Counter()
        self._fed: dict[Request, list[tuple[Token, int, int]]] = {}  # (token, its value, step)
        self.starts: dict[str, list[DraftStart]] = {}
        self._retracted: set[str] = set()

    # ---- between steps -------------------------------------------------------------------------------------

    def range(self, name: str, step: int, size: int) -> AbstractContextManager[object]:
        if name == "receive":
            self._between_steps()
        elif name == "prepare":
            self._violations.add(
                row_counts(self._scheduler.running_batch, _named("running", self._scheduler.running_batch))
            )
        return super().range(name, step, size)

    def _between_steps(self) -> None:
        running, last = self._scheduler.running_batch, self._scheduler.last_batch
        batches = {"running": running}
        joins = self._scheduler.engine.outbox is None
        if last is not None and last is not running and last.forward_mode.is_extend and joins:
            batches["prefilled"] = last
        spec = self._scheduler.engine.config.speculative
        # The overlapped worker's batch has the lengths of its last verify, or sentinels.
        settled = spec is None or spec.mode == "v1"
        for name, batch in batches.items():
            # While other microbatches run, one of them may have a later chunk of this batch's prompt.
            exact = settled and not (self._scheduler.parked and batch.chunked_req is not None)
            self._violations.add(
                mirrors(batch, _named(name, batch), self.peek, lengths=settled, sentinels=True, settled=exact)
            )
            if not settled:
                self._violations.add(_overcommitted(batch))
        if self._scheduler.batches % self._stride == 0:
            self._violations.add(self._memory())

    def _memory(self) -> Iterator[Violation]:
        scheduler = self._scheduler
        try:
            check_memory(scheduler.engine.cache, _holders(scheduler), peek=self.peek)
            scheduler.engine.tier.check(self.peek)
        except MemoryInvariantError as error:
            text = f"before step {scheduler.next_step}: {error}"
            yield Violation("every page and row is in one place", "kv", text)

    # ---- tokens that a step was given before the host had them --------------------------------------------------

    def fed(self, forward: Forward) -> None:
        """Record the input tokens of decodes, to compare them when the host has the tokens; masks are no tokens."""
        if forward.config.blocks is not None:
            return
        for token, value in zip(forward.tokens(), forward.input_ids(), strict=True):
            if not token.prompt:
                self._fed.setdefault(token.request, []).append((token, value, forward.batch.step))
                self._compare(token.request)

    def drafted(self, batch: ScheduleBatch, starts: Sequence[DraftStart]) -> None:
        """Record the tokens that drafts start from."""
        rows = batch.req_pool_indices_cpu.tolist()
        for req, row, start in zip(batch.reqs, rows, starts, strict=True):
            if req.status is not Status.RUNNING:
                continue
            token = Token(req, row, start.length, prompt=False)
            self._fed.setdefault(req, []).append((token, start.bonus, batch.step))
            self._compare(req)
            if req.id not in self._retracted:
                self.starts.setdefault(req.id, []).append(start)

    def tokens(self, requests: Sequence[Request], count: int) -> None:  # noqa: ARG002
        for request in requests:
            if request.finished:
                text = f"request {request.id} got a token after it had ended"
                self._violations.add([Violation("a request ends once", "output_ids", text)])
            self._compare(request)

    def retracted(self, request: Request) -> None:
        self._fed.pop(request, None)
        self._retracted.add(request.id)
        self.starts.pop(request.id, None)

    def _compare(self, request: Request) -> None:
        """Compare the recorded tokens that the host has by now."""
        waiting = self._fed.get(request, [])
        known = [entry for entry in waiting if entry[0].position < request.seqlen]
        self._violations.add(_misfed(request, known))
        if known:
            self._fed[request] = waiting[len(known) :]

    # ---- ends ----------------------------------------------------------------------------------------------

    def launched(self, info: StepInfo) -> None:
        self._unsettled[info.step] = info

    def settled(self, info: StepInfo) -> None:
        del self._unsettled[info.step]

    def ended(self, request: Request) -> None:
        self._fed.pop(request, None)
        self._ended[request.id] += 1
        if self._ended[request.id] > 1:
            text = f"request {request.id} ended {self._ended[request.id]} times"
            self._violations.add([Violation("a request ends once", "status", text)])
        self._violations.add(_misended(request, self._scheduler.engine.config))
        if request.sampling.grammar is not None and request.reason in ("length", "stop"):
            self._violations.add(_disallowed(request, self._grammars.compile(request.sampling.grammar)))

    @cached_property
    def _grammars(self) -> GrammarCache:
        config = self._scheduler.engine.config
        return GrammarCache(config.vocab_size, config.eos_token_ids)

    def at_the_end(self) -> Iterator[Violation]:
        """After the last step nothing is in flight, and no memory is held, except for the ring of kept references."""
        yield from self._memory()
        engine = self._scheduler.engine
        held = engine.slots.size - engine.slots.available_size()
        counts = {
            "launched steps that were not settled": len(self._unsettled),
            "requests that have not ended": len(self._scheduler.unfinished()),
            "rows that are held": held,
            "KV tokens in locked nodes of the prefix cache": engine.cache.protected_size(),
        }
        for what, count in counts.items():
            if count:
                yield Violation("nothing in flight at the end", what, f"at the end there are {count} {what}")


def _overcommitted(batch: ScheduleBatch) -> Iterator[Violation]:
    """Requests whose committed KV is longer than their tokens, the one included that the step in flight computes."""
    for req in batch.reqs:
        if req.status is Status.RUNNING and req.kv_committed_len > req.seqlen:
            text = f"request {req.id} has committed KV of {req.kv_committed_len} tokens, but has {req.seqlen}"
            yield Violation("committed KV is of known tokens", "kv_committed_len", text)


def _named(name: str, batch: ScheduleBatch) -> str:
    return f"the {name} batch (last launched as step {batch.step})"


def _misended(request: Request, config: EngineConfig) -> Iterator[Violation]:
    """A request ends at its first stop token or with as many tokens as it asked for, whichever comes first. An
    embedding counts as one token."""
    sampling, output = request.sampling, request.output_ids
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else config.eos_token_ids)}
    first = next((place for place, token in enumerate(output, 1) if token in stops), None)
    most = 1 if config.embedding else sampling.max_new_tokens
    meant = min(most, first or most)
    early = request.reason in ("length", "stop") and len(output) < meant
    unstopped = request.reason == "stop" and first is None
    if len(output) > meant or early or unstopped:
        stop = "no stop token" if first is None else f"its first stop token as number {first}"
        text = f"request {request.id} ended ({request.reason}) with {len(output)} of at most {most} tokens, and {stop}"
        yield Violation("a request ends where it asked to", "output_ids", text)


def _disallowed(request: Request, grammar: GrammarState) -> Iterator[Violation]:
    """``grammar``: at its start, and shared with no request."""
    for place, token in enumerate(request.output_ids, 1):
        if grammar.is_terminated():
            return
        try:
            grammar.accept_token(token)
        except GrammarError:
            text = f"request {request.id}: its grammar does not allow token {token} as number {place} of its output"
            yield Violation("a grammar allows the tokens", "output_ids", text)
            return


def _misfed(request: Request, known: Sequence[tuple[Token, int, int]]) -> Iterator[Violation]:
    for token, value, step in known:
        [meant] = request.tokens(token.position, token.position + 1)
        if value != meant:
            text = (
                f"step {step}, request {request.id}, position {token.position}: row {token.row} of the relay "
                f"gave token {value}, but the host has {meant} there"
            )
            yield Violation("a step is fed the tokens that were sampled", "input_ids", text)


def _holders(scheduler: Scheduler) -> list[Request]:
    """Requests that hold a row between steps."""
    last = [] if scheduler.last_batch is None else [scheduler.last_batch]
    prefilled = [req for batch in last if batch.forward_mode.is_extend for req in batch.reqs]
    parked = [req for batch in scheduler.parked for req in batch.reqs]
    under_way = [] if scheduler.chunked_req is None else [scheduler.chunked_req]
    engine = scheduler.engine
    elsewhere = [
        *engine.tier.absent,
        *(engine.outbox.held if engine.outbox else ()),
        *(engine.inbox.held if engine.inbox else ()),
        *scheduler.held(),
    ]
    found = dict.fromkeys([*scheduler.running_batch.reqs, *prefilled, *parked, *under_way, *elsewhere])
    return [req for req in found if req.req_pool_idx is not None]


class WatchedLink:
    """The same link; counts the sends of tensors and the flushes of each tag."""

    def __init__(self, link: Link) -> None:
        self.rank, self.size = link.rank, link.size
        self.receive, self.all_to_all = link.receive, link.all_to_all
        self.poll, self.wait, self.gone = link.poll, link.wait, link.gone
        self._link = link
        self._sends: Counter[str] = Counter()
        self._flushed: set[str] = set()

    def unreleased(self) -> Iterator[Violation]:
        """Tags whose tensors are all kept although one send has followed another."""
        for tag, count in self._sends.items():
            if count > 1 and tag not in self._flushed:
                text = (
                    f"rank {self.rank} keeps the tensors of all {count} sends under '{tag}': none was flushed"
                )
                yield Violation("sent tensors are released", tag, text)

    def send(self, to: int, tag: str, value: Any, tensors: Sequence[torch.Tensor] = ()) -> None:
        self._sends[tag] += bool(tensors)
        self._link.send(to, tag, value, tensors)

    def flush(self, tag: str) -> None:
        self._flushed.add(tag)
        self._link.flush(tag)
