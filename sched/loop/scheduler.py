"""The scheduler: receive, plan, launch, settle (upstream ``Scheduler``). The loops decide when each is called."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

from ..admission import (
    Limits,
    PrefillBudget,
    WaitingOrder,
    future_growth,
    init_next_round_input,
    next_step_tokens,
    refusal,
    start_grammar,
)
from ..batch import FIRST_STEP, STEP_STRIDE, ScheduleBatch, StepResult, step_infos
from ..config import Control
from ..model.sampling import sampling_of
from ..pipeline import ChunkSizes
from ..request import Request, Status
from .embedding import settle_embedding
from .engine import Engine
from .prepare import filter_rows, merge_rows, mix_with_running, prepare_for_decode, prepare_for_extend, rejoin
from .retract import NewTokenRatio, decode_fits, release, retract
from .settle import close, drop, finish, settle, settle_verify

Settle = Callable[[Engine, ScheduleBatch, StepResult], bool]
"""Reads a step's result. Returns whether it was a decode in which every request got its token and continues."""


class Scheduler:
    """State between steps. ``running_batch`` decodes; ``last_batch`` was launched last and, if it was a prefill, joins
    ``running_batch`` at the next plan; ``chunked_req`` is the one request whose prompt has been computed in part.

    Invariant: a request is in exactly one of waiting_queue, running_batch, last_batch (prefill) or chunked_req, or
    it has ended; a pipeline's microbatches take turns as running_batch and last_batch. If prompts are staged, the tier
    holds a request between last_batch and running_batch.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        config = engine.config
        self.waiting_queue: list[Request] = []
        self.running_batch = ScheduleBatch.empty()
        self.last_batch: ScheduleBatch | None = None
        self.chunked_req: Request | None = None
        self.chunk_sizes: ChunkSizes | None = None  # if they follow latencies
        self.parked: Sequence[ScheduleBatch] = ()  # of microbatches whose turn it is not
        self.controls: Collection[Control] = ()  # that the run under way has not come to
        # The next batch's number; under speculation the steps beside it have numbers of their own.
        self._stride = 1 if config.speculative is None else STEP_STRIDE
        self.next_step = 0 if config.speculative is None else FIRST_STEP
        self._chunk_launched = False
        self._ratio = NewTokenRatio(config.schedule_conservativeness)
        match = partial(init_next_round_input, cache=engine.cache) if config.radix_cache else None
        self._order = WaitingOrder(config.policy, seed=config.seed, match=match)

    # ---- receive -------------------------------------------------------------------------------------------

    def receive(self) -> None:
        """Queue the requests that have arrived; refuse those that can never run."""
        engine = self.engine
        arrived = engine.source.due(engine.clock.now())
        with engine.observer.range("receive", self.next_step, len(arrived)):
            for req in arrived:
                if self.accepts(req):
                    self.waiting_queue.append(req)

    def abort(self, req: Request, reason: str) -> None:
        """End ``req`` early: at once if it holds nothing, else when its next token arrives."""
        if req.status.terminal:
            return
        if req.status is Status.WAITING and req is not self.chunked_req:
            self.waiting_queue = [other for other in self.waiting_queue if other is not req]
            close(self.engine, req, Status.ABORTED, reason)
        elif self.engine.tier.is_staging(req):
            finish(self.engine, req, Status.ABORTED, reason)
        else:
            req.end_with_next_token(reason)

    def accepts(self, req: Request) -> bool:
        """Whether ``req``, which has just arrived, may be queued. Otherwise it ends here."""
        if req.status.terminal:  # aborted before it arrived
            return False
        engine = self.engine
        reason = refusal(req, engine.config, engine.tier.size) or start_grammar(req, engine.grammars)
        if reason:
            close(engine, req, Status.REFUSED, reason)
        elif req.to_finish:
            close(engine, req, Status.ABORTED, req.to_finish)
        return not req.status.terminal

    # ---- plan ----------------------------------------------------------------------------------------------

    def get_next_batch_to_run(self) -> ScheduleBatch | None:
        """The next step's batch, ready to launch: prefill first, else the running decodes; None when there is
        nothing to do."""
        batch = self.next_prefill_batch()
        if batch is None and not self.running_batch.is_empty:
            batch = self.next_decode_batch() or self.next_prefill_batch()
        return self.numbered(batch)

    def numbered(self, batch: ScheduleBatch | None) -> ScheduleBatch | None:
        """``batch``, which has just been planned, with its number taken."""
        if batch is not None:
            self.take_step()
            allocator, cache = self.engine.allocator, self.engine.cache
            used = allocator.size - allocator.available_size() - cache.evictable_size()
            self.engine.observer.kv_usage(used)
        return batch

    @property
    def batches(self) -> int:
        """How many batches have been planned."""
        return self.next_step // self._stride

    def take_step(self) -> int:
        """Take the number of the next batch."""
        step = self.next_step
        self.next_step += self._stride
        return step

    def absorb_last_batch(self) -> None:
        """Cache the chunk that was launched, and let finished prefills join the running batch."""
        chunked = self.chunked_req
        if chunked is not None and self._chunk_launched:
            self.engine.cache.cache_unfinished_req(chunked)
            self._chunk_launched = False
            if self.engine.outbox is not None:
                self.engine.outbox.chunk_cached(chunked)
        last = self.last_batch
        if self.engine.tier.stages:
            self._absorb_staged(last)
            return
        if last is None or not last.forward_mode.is_extend or not self._prompts_join:
            return
        before = last.batch_size
        # In a pipeline a later microbatch may have run the rest of a prompt of which this batch has a chunk.
        unfinished = [req for req in (chunked, last.chunked_req) if req is not None]
        filter_rows(self.engine, last, without=unfinished)
        if last.batch_size < before:
            self.running_batch.batch_is_full = False
        if not self.engine.relay.joins(last):
            return
        self.join(last)
        self.last_batch = None

    @property
    def _prompts_join(self) -> bool:
        """Whether a request decodes here when its prompt is complete."""
        return self.engine.outbox is None and not self.engine.config.embedding

    def _absorb_staged(self, last: ScheduleBatch | None) -> None:
        """Let staged requests join once their KV is on the host. They release device memory then, as do those that have
        ended."""
        ready = self.engine.tier.collect_ready_reqs()
        if ready or (last is not None and any(req.status.terminal for req in last.reqs)):
            self.running_batch.batch_is_full = False
        if ready:
            with self.engine.observer.range("rejoin", self.next_step, len(ready)):
                self.join(rejoin(self.engine, ready))

    def join(self, batch: ScheduleBatch) -> None:
        """Add the requests of ``batch``, which are ready to decode, to the running batch."""
        if self.running_batch.is_empty:
            batch.batch_is_full = self.running_batch.batch_is_full
            batch.rows_changed = True
            self.running_batch = batch
        else:
            merge_rows(self.engine, self.running_batch, batch)

    def next_prefill_batch(self) -> ScheduleBatch | None:
        """The prompts that may begin now, prepared; None if there is none."""
        waiting = len(self.waiting_queue)
        examined = self._order.examined(waiting, self._free_rows()) if waiting else 0
        with self.engine.observer.range("admit", self.next_step, examined):
            self.absorb_last_batch()
            budget = self._plan_round()
        return None if budget is None or not budget.taken else self._build_prefill(budget)

    def _plan_round(self) -> PrefillBudget | None:
        """The requests that this round takes, as its spent budget; None if no prompt may begin or continue."""
        running, chunked = self.running_batch, self.chunked_req
        if running.is_empty:
            running.batch_is_full = False
        if chunked is None:
            if running.batch_is_full or not self.waiting_queue:
                return None
            if self._free_rows() <= 0:
                running.batch_is_full = True
                return None
        growth = future_growth(running.reqs, self._ratio.value)
        budget = PrefillBudget(self._limits(), self.engine.cache, self.engine.tier, growth)
        if chunked is not None:
            budget.continue_chunked(chunked)
        if not budget.out_of_kv:
            self._add_waiting(budget, self._free_rows() + (chunked is not None))
        running.batch_is_full |= budget.out_of_kv
        return budget

    def _add_waiting(self, budget: PrefillBudget, most: int) -> None:
        """Add waiting requests while the budget lasts, up to ``most`` in all."""
        matched = self._order.sort(self.waiting_queue)
        for req in self.waiting_queue:
            if len(budget.taken) >= most:
                self.running_batch.batch_is_full = True
                return
            if not matched:
                init_next_round_input(req, self.engine.cache)
            if not budget.try_add(req):
                return

    def _build_prefill(self, budget: PrefillBudget) -> ScheduleBatch:
        engine = self.engine
        taken = set(map(id, budget.taken))
        self.waiting_queue = [req for req in self.waiting_queue if id(req) not in taken]
        engine.observer.planned(self.next_step, "prefill")
        with engine.observer.range("prepare", self.next_step, len(budget.taken)):
            batch = prepare_for_extend(engine, budget.taken, self.next_step)
        self.chunked_req = batch.chunked_req = budget.chunked
        if budget.chunked is not None:
            budget.chunked.inflight_middle_chunks += 1
            self._chunk_launched = True
        if self._mixes:
            self._mix(batch)
        return batch

    @property
    def _mixes(self) -> bool:
        config = self.engine.config
        return config.mixed_chunk and config.chunked_prefill_size is not None

    def _mix(self, batch: ScheduleBatch) -> None:
        running = self.running_batch
        if running.is_empty or any(
            needs.logprobs or needs.prompt_logprobs
            for needs in (sampling_of(batch).needs, sampling_of(running).needs)
        ):
            return
        self.engine.observer.planned(self.next_step, "mixed")
        with self.engine.observer.range("prepare", self.next_step, running.batch_size):
            filter_rows(self.engine, running)
            if not running.is_empty:
                prepare_for_decode(self.engine, running, self.next_step)
                mix_with_running(self.engine, batch, running)
        self.running_batch = ScheduleBatch.empty(batch_is_full=running.batch_is_full)

    def next_decode_batch(self) -> ScheduleBatch | None:
        """The running requests, prepared for a decode; None if none is left."""
        batch, engine = self.running_batch, self.engine
        before = batch.batch_size
        engine.observer.planned(self.next_step, "decode" if engine.config.speculative is None else "verify")
        with engine.observer.range("prepare", self.next_step, before):
            filter_rows(engine, batch)
            if batch.is_empty:
                batch.batch_is_full = False
                return None
            if decode_fits(engine, batch.reqs):
                self._ratio.decay()
            else:
                victims = retract(engine, batch, self.chunked_req)
                self._ratio.after_retraction(batch.reqs)
                self._wait_again(victims)
            if batch.batch_size < before:
                batch.batch_is_full = False
            if not batch.reqs:
                return None
            prepare_for_decode(engine, batch, self.next_step)
        return batch

    def retract_all(self) -> None:
        """Release the KV of all requests, which wait again. No result may be in flight, and the last batch is
        absorbed."""
        running, self.running_batch = self.running_batch.reqs, ScheduleBatch.empty()
        chunked = [] if self.chunked_req is None else [self.chunked_req]
        under_way = dict.fromkeys([*running, *chunked, *self.engine.tier.absent])
        self._wait_again([release(self.engine, req) for req in under_way if not req.finished])

    def _wait_again(self, victims: Sequence[Request]) -> None:
        """Queue retracted requests; those that were to end do so."""
        if any(victim is self.chunked_req for victim in victims):
            self.chunked_req = None
        for req in victims:
            if req.to_finish:
                close(self.engine, req, Status.ABORTED, req.to_finish)
            elif self.engine.inbox is None:
                self.waiting_queue.append(req)

    # ---- stop ----------------------------------------------------------------------------------------------

    def held(self) -> Iterable[Request]:
        """The requests that only a subclass holds."""
        return ()

    def unfinished(self) -> list[Request]:
        """The requests that were taken from the source and have not ended."""
        batches = [self.running_batch, *self.parked, *([self.last_batch] if self.last_batch else ())]
        running = [req for batch in batches for req in batch.reqs]
        under_way = [*([self.chunked_req] if self.chunked_req else ()), *self.engine.tier.absent]
        found = dict.fromkeys([*running, *under_way, *self.held(), *self.waiting_queue])
        return [req for req in found if not req.finished]

    def give_up(self, launched: Iterable[ScheduleBatch], reason: str) -> None:
        """End every request, because a rank that this one depends on is gone. The ``launched`` batches are not settled.
        The device is synchronized first, since it may use the requests' KV."""
        self.engine.streams.module.synchronize()
        for batch in launched:
            for info in step_infos(batch, self.engine.config.speculative, steady=False):
                self.engine.observer.settled(info)
        for req in self.unfinished():
            drop(self.engine, req, Status.FAILED, reason)
        self.waiting_queue, self.running_batch = [], ScheduleBatch.empty()
        self.last_batch = self.chunked_req = None
        self.parked = ()

    # ---- settle --------------------------------------------------------------------------------------------

    def launched(self, batch: ScheduleBatch) -> ScheduleBatch:
        """Announce a launch. Returns the copy of the batch that ``settle`` needs."""
        record = batch.copy()
        record.penalised = sampling_of(batch).needs.penalties
        batch.rows_changed = False
        for info in step_infos(record, self.engine.config.speculative, steady=False):
            self.engine.observer.launched(info)
        return record

    def settle(self, batch: ScheduleBatch, result: StepResult) -> None:
        """Apply the step's result to its requests."""
        config = self.engine.config
        verified = config.speculative is not None and batch.forward_mode.is_decode
        self.settle_by(
            settle_embedding if config.embedding else settle_verify if verified else settle, batch, result
        )

    def settle_by(self, rule: Settle, batch: ScheduleBatch, result: StepResult) -> None:
        with self.engine.observer.range("settle", batch.step, batch.batch_size):
            all_continue = rule(self.engine, batch, result)
        steady = all_continue and not batch.rows_changed and not batch.penalised
        for info in step_infos(batch, self.engine.config.speculative, steady=steady):
            self.engine.observer.settled(info)

    def rest(self) -> bool:
        """Sleep until the next arrival, because there is nothing to run. Returns False if there is none."""
        self._ratio.reset()
        # Requests that are staged, or that have just joined, can run soon.
        if self.engine.tier.absent or not self.running_batch.is_empty:
            return True
        at = self.engine.source.next_at()
        if at is None:
            idle = not self.waiting_queue and self.chunked_req is None
            assert idle, f"{len(self.waiting_queue)} requests wait and none can run"
            return False
        self.engine.clock.sleep_until(at)
        return True

    # ---- helpers -------------------------------------------------------------------------------------------

    def _free_rows(self) -> int:
        """How many requests may still join; those being prefilled count as joined."""
        if not self._prompts_join:
            # Requests whose KV is being sent, or whose result is awaited, keep their rows.
            return self.engine.slots.available_size()
        under_way = max(self.chunked_req is not None, len(self.engine.tier.absent))
        used = self.running_batch.batch_size + under_way
        free = self.engine.config.running_limit - used
        # Microbatches share the rows, and there may be more microbatches than stages.
        return free if self.engine.stage is None else min(free, self.engine.slots.available_size())

    def _limits(self) -> Limits:
        config, req, sizes = self.engine.config, self.chunked_req, self.chunk_sizes
        chunk = config.chunked_prefill_size
        if sizes is not None and req is not None and req.prefix_indices is not None:
            chunk = sizes.behind(req.prefix_indices.shape[0])
        mixed = self.running_batch.reqs if self._mixes else ()
        return Limits(
            page_size=config.page_size,
            max_prefill_tokens=config.max_prefill_tokens,
            chunked_prefill_size=chunk,
            mixed_decode_tokens=len(mixed),
            mixed_reserve_tokens=next_step_tokens(mixed, config),
        )
