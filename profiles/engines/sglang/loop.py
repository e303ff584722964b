"""SGLang's loop: its methods, wrapped to read the steps and ranges of a run and to hand requests in and out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Final

import torch

from ....sched.link import FOREVER, LinkError
from ....sched.observe import NO_STEP, StepKind, StreamName
from ....sched.request import Request, Status
from ...platform.resolve import speculative_config
from ...run.system import SystemParts
from ..bridge import AllEnded, EngineSystem, ranged, wrap_methods
from .arguments import aborted, tokenized
from .eagle import wrap_worker
from .transfer import HOST, KVTransfers

# Streams of SGLang's scheduler, and of its coordinator of KV on the host.
_STREAMS: Final[Mapping[StreamName, str]] = {
    "forward": "forward_stream",
    "copy": "copy_stream",
    "staging": "write_staging_stream",
    "backup": "decode_backup_stream",
}
# Methods of a prefix cache that get a request whose KV is about to be released, from old to new.
_RELEASES: Final = ("cache_finished_req", "claim_kv_row")
_QUIET_TURNS: Final = 2  # of the loop, after which a worker whose requests all wait has nothing left to do
_MARKS_OF_ENDS: Final = ("to_abort", "to_finish")  # of a request, from old to new
# What the serial worker of speculation says of each request, without the bonus, from old to new.
_DRAFTS_ACCEPTED: Final = ("accept_length_per_req_cpu", "num_correct_drafts_per_req_cpu")
# What a message to clients has beside tokens: log probabilities of these, and of prompts.
_SCORES: Final = ("output_token_logprobs_val", "input_token_logprobs_val")
# Where requests are that are in no batch: those whose grammars are compiled, and those of a worker of a pair.
_QUEUES: Final = (
    *("grammar_queue", "grammar_manager"),
    *("disagg_prefill_bootstrap_queue", "disagg_prefill_inflight_queue"),
    *("disagg_decode_prealloc_queue", "disagg_decode_transfer_queue"),
)


class SglangLoop(EngineSystem):
    """SGLang's loop as a system. ``scheduler`` is SGLang's, whose methods ``wrap_loop`` has take requests from the run,
    and give steps, tokens and ends to it."""

    scheduler: Any

    def __init__(self, parts: SystemParts) -> None:
        self._spec = speculative_config(parts.resolved.scenario.engine.speculative)
        super().__init__(parts, speculates=self._spec is not None)
        context = parts.context
        self._role = None if context.place is None else context.place.role
        self._stage = context.stage
        linked = self._role is not None and context.link is not None
        self._transfers = KVTransfers(parts, self._bridge) if linked else None
        self._decode_kind: StepKind = "decode" if self._spec is None else "verify"
        self._turns = 0  # of the loop since the last step
        self._named = False  # the streams
        self._schedule_stream: Any = None
        self._gone: list[Any] = []  # messages of clients that have gone
        self._aborted: dict[str, str] = {}  # their requests, and why each was aborted
        self._accepted: set[str] = set()  # requests that were in a batch without having been refused

    def run(self) -> None:
        try:
            self._run_loop()
        except AllEnded:
            # ``forget`` may free what the warm-up has left. A lost request holds its memory, and is reported itself.
            if not self._bridge.lost:
                self.leak = self._held() or self.leak

    def forget(self) -> None:
        if self._transfers is not None:
            self._transfers.forget()
        self._aborted.clear()
        self._accepted.clear()
        with torch.cuda.stream(self._schedule_stream):  # as in SGLang's loop, whose writes it follows
            self.scheduler.flush_cache()

    def abort(self, request: Request, reason: str) -> None:
        self._gone.append(aborted(request.id))
        self._aborted[request.id] = reason

    def _run_loop(self) -> None:
        scheduler, self._named = self.scheduler, False
        if hasattr(scheduler, "run_event_loop"):
            scheduler.run_event_loop()
        else:
            loop = "event_loop_overlap" if scheduler.enable_overlap else "event_loop_normal"
            loop = loop if self._stage is None else "event_loop_pp"
            getattr(scheduler, loop if self._role is None else f"{loop}_disagg_{self._role}")()

    def _held(self) -> str:
        """The KV slots and rows that are in use after all requests have ended, or that are free and do not exist; empty
        if none are. SGLang has a check of its own, which its overlapped loop does not reach here."""
        pools = {"rows": self.scheduler.req_to_token_pool}
        if self._coordinator is not None:
            pools["KV slots of buffers"] = self.scheduler.token_to_kv_pool_allocator.hisparse_attn_allocator
            pools["KV slots of the host"] = self._coordinator.mem_pool_host
        used = {"KV slots": self._used_tokens()}
        for what, pool in pools.items():
            reserve = getattr(pool, "pre_alloc_size", 0)  # rows of a decode worker for KV that it waits for
            used[what] = int(pool.size + reserve - pool.available_size())
        if twice := [f"{-count} {what}" for what, count in used.items() if count < 0]:
            found = f"{' and '.join(twice)} more are free than exist: some were freed twice"
            return f"all requests have ended, and {found}"
        held = [f"{count} {what}" for what, count in used.items() if count]
        return f"all requests have ended, and {' and '.join(held)} were not freed" if held else ""

    def wrap_loop(self) -> None:
        self._wrap_batches()
        scheduler = self.scheduler
        receiver = getattr(scheduler, "request_receiver", scheduler)
        wrap_methods(
            type(receiver), {"recv_requests": self._receive}
        )  # instances of later versions are frozen
        # Everything of the next step that is in no other range, such as the removal of rows that have ended.
        plan = ranged(self._reports, "plan")
        of_all = {
            "get_next_batch_to_run": plan,
            "get_new_batch_prefill": ranged(self._reports, "admit", self._waiting),
            "run_batch": self._launch,
            "process_batch_result": self._settle,
        }
        of_pairs = {
            "get_next_disagg_prefill_batch_to_run": plan,
            "get_next_disagg_decode_batch_to_run": plan,
            "process_decode_queue": self._preallocate,
            "process_batch_result_disagg_prefill": self._settle,
            "process_disagg_prefill_inflight_queue": self._end_sent,
        }
        wrap_methods(scheduler, of_all, of_pairs)
        if self._spec is not None:
            wrap_worker(scheduler.draft_worker, self._bridge, self._reports)
        release = next(name for name in _RELEASES if hasattr(scheduler.tree_cache, name))
        wrap_methods(scheduler.tree_cache, {release: self._release})
        self._capture_outputs()

    def _wrap_batches(self) -> None:
        of_all = {
            "prepare_for_extend": self._prepare("prefill"),
            "prepare_for_decode": self._prepare(self._decode_kind),
            "mix_with_running": self._mix,
            "retract_decode": self._retract,
        }
        of_decode_workers = {  # from old to new
            "prepare_for_prebuilt_extend": self._prebuild,
            "process_prebuilt_extend": self._conclude,
            "prepare_for_prebuilt": self._prebuild,
            "process_prebuilt": self._conclude,
        }
        batches = import_module("sglang.srt.managers.schedule_batch").ScheduleBatch
        wrap_methods(batches, of_all, of_decode_workers)

    def _capture_outputs(self) -> None:
        """Take the messages that would go to clients."""
        self._bridge.streams = True
        channels = getattr(self.scheduler, "ipc_channels", self.scheduler)
        for name in ("send_to_tokenizer", "send_to_detokenizer"):
            getattr(channels, name).send_output = self._sent

    def _receive(self, original: Callable[..., list[Any]], *args: Any, **kwargs: Any) -> list[Any]:
        scheduler = self.scheduler
        if not self._named:
            self._name_streams()
        with self._reports.range("receive", 0):
            busy = bool(scheduler.waiting_queue or self._gone or self._launches() or self._staging())
            if not busy and any(self._queued(name) for name in _QUEUES):
                busy = self._transfers is None or self._await_transfers(self._transfers)
            elif self._transfers is not None and self._transfers.arrived():
                self._turns = 0
            self._turns += 1
            host = None if self._transfers is None else HOST
            arrived = [tokenized(request, self._role, host) for request in self._reports.due(not busy)]
            if arrived:
                self._turns = 0
            if self._stage is not None and not self._stage.is_first:
                return original(*args, **kwargs)
            messages, self._gone = [*arrived, *self._gone], []
            return messages

    def _name_streams(self) -> None:
        """Called in the loop, whose current stream is the schedule stream."""
        self._named, self._schedule_stream = True, torch.cuda.current_stream()
        for name, attribute in _STREAMS.items():
            for holder in (self.scheduler, self._coordinator):
                if (stream := getattr(holder, attribute, None)) is not None:
                    self._parts.observer.stream(name, stream)
        self._parts.observer.stream("schedule", self._schedule_stream)

    def _await_transfers(self, transfers: KVTransfers) -> bool:
        """Every request waits for the other worker: sleep, unless something has happened lately that SGLang has not
        seen to yet. Returns whether there is something to wait for."""
        if transfers.arrived():
            self._turns = 0
        elif self._turns > _QUIET_TURNS:
            arrival = self._bridge.next_arrival()
            try:
                transfers.sleep_until(FOREVER if arrival is None else arrival)
            except LinkError:
                return False
            self._turns = 0
        return True

    def _launches(self) -> bool:
        """Whether a step is in flight, or can follow. A stage of a pipeline keeps its batches for each microbatch, and
        has none in flight if it has launched none for two rounds."""
        if self._stage is not None:
            return self._turns <= 2 * self._stage.microbatches
        names = ("last_batch", "chunked_req")
        return bool(
            self.scheduler.running_batch.reqs or any(getattr(self.scheduler, name, None) for name in names)
        )

    def _staging(self) -> bool:
        """Whether a prompt's KV is on its way to the host."""
        return self._coordinator is not None and bool(self._coordinator.ack_staging_queue)

    def _queued(self, name: str) -> bool:
        queue = getattr(self.scheduler, name, None)
        return bool(getattr(queue, "queue", queue))

    def _waiting(self) -> int:
        return len(self.scheduler.waiting_queue)

    def _preallocate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Rows and pages for the KV that a decode worker will get."""
        with self._parts.observer.range("admit", NO_STEP, self._waiting()):
            return original(*args, **kwargs)

    def _prepare(self, kind: StepKind) -> Callable[..., Any]:
        def prepare(original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
            self._reports.planned(kind)
            with self._reports.range("prepare", len(batch.reqs)):
                return original(batch, *args, **kwargs)

        return prepare

    def _mix(self, original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        self._reports.planned("mixed")
        return original(batch, *args, **kwargs)

    def _retract(self, original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(batch, *args, **kwargs)
        for req in out[0] if isinstance(out, tuple) else ():
            self._reports.retracted(req.rid)
        return out

    def _launch(self, original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        self._turns = 0
        cached = self._cached(batch)
        kind = _kind(batch.forward_mode)
        self._parts.observer.kv_usage(self._used_tokens())
        tokens = int(batch.extend_num_tokens or 0)
        if kind == "decode":
            kind, tokens = self._decode_kind, len(cached) * (self._spec.draft_tokens if self._spec else 1)
        orchestrator = getattr(batch.sampling_info, "penalizer_orchestrator", None)
        penalised = bool(getattr(orchestrator, "is_required", False))
        step = self._reports.begin_step(kind, cached, tokens, penalised)
        with self._reports.range("publish", len(cached), step):
            result = original(batch, *args, **kwargs)
        self._reports.launched(step)
        # A stage of a pipeline settles another result, of the same batch.
        (result if self._stage is None else batch).schedbench_step = step
        return result

    def _cached(self, batch: Any) -> dict[str, int]:
        """Prompt tokens of the requests of a batch that come from the prefix cache. A request whose prompt SGLang
        refuses runs with a prompt of one token, and is marked to be ended before."""
        for req in batch.reqs:
            if not any(getattr(req, name, None) for name in _MARKS_OF_ENDS):
                self._accepted.add(req.rid)
        return {req.rid: int(req.cached_tokens) for req in batch.reqs}

    def _prebuild(self, original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        """A decode worker's batch of prompts whose KV has come: a step without a forward, which settles at once."""
        self._reports.planned("prebuilt")
        cached = self._cached(batch)
        batch.schedbench_step = self._reports.begin_step("prebuilt", cached, 0)
        with self._reports.range("prepare", len(batch.reqs), batch.schedbench_step):
            return original(batch, *args, **kwargs)

    def _conclude(self, original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        step, reqs = batch.schedbench_step, list(batch.reqs)
        with self._reports.range("prepare", len(reqs), step):
            out = original(batch, *args, **kwargs)
        self._reports.launched(step)
        self._reports.settled(step, self._advance(reqs))
        return out

    def _end_sent(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A prefill worker's requests end when their KV has been sent."""
        sent = original(*args, **kwargs)
        self._advance(sent)
        return sent

    def _advance(self, reqs: Sequence[Any]) -> bool:
        """Report the tokens of requests, and the ends of those that have ended; returns whether one has."""
        ended = [req for req in reqs if req.finished()]
        for req in reqs:
            self._reports.advance(req.rid, req.output_ids_through_stop)
        for req in ended:
            self._reports.end(req.rid, *self._end(req.rid, req.finished_reason))
        return bool(ended)

    def _end(self, request_id: str, reason: Any) -> tuple[Status, str]:
        name = type(reason).__name__
        if name == "FINISH_ABORT":
            return self._aborted_end(request_id, getattr(reason, "message", ""))
        return Status.FINISHED, "length" if name == "FINISH_LENGTH" else "stop"

    def _aborted_end(self, request_id: str, message: str) -> tuple[Status, str]:
        """Of a request that SGLang ends without a client's message, ``message`` is the reason: it was refused, or it
        failed after it had been accepted. SGLang aborts all requests whose ids begin with that of a message."""
        reasons = (reason for gone, reason in self._aborted.items() if request_id.startswith(gone))
        if reason := next(reasons, ""):
            return Status.ABORTED, reason
        status = Status.FAILED if request_id in self._accepted else Status.REFUSED
        return status, message or "aborted by SGLang"

    @property
    def _coordinator(self) -> Any:
        """SGLang's coordinator of KV on the host, or None."""
        return getattr(self.scheduler, "hisparse_coordinator", None)

    def _used_tokens(self) -> int:
        pool, cache = self.scheduler.token_to_kv_pool_allocator, self.scheduler.tree_cache
        pool = getattr(pool, "logical_attn_allocator", pool)
        return int(pool.size - pool.available_size() - cache.evictable_size())

    def _release(self, original: Callable[..., Any], req: Any, *args: Any, **kwargs: Any) -> Any:
        """The KV of a request is given to the cache: what it holds is audited first, if the request is complete."""
        self._reports.advance(req.rid, req.output_ids_through_stop)
        if req.finished() and type(req.finished_reason).__name__ != "FINISH_ABORT":
            holder = req if hasattr(req, "req_pool_idx") else req.kv
            self._reports.ending(req.rid, int(holder.req_pool_idx))
        return original(req, *args, **kwargs)

    def _settle(
        self, original: Callable[..., Any], batch: Any, result: Any, *args: Any, **kwargs: Any
    ) -> Any:
        step = vars(result if self._stage is None else batch).pop("schedbench_step", None)
        if step is None:  # a method that another one of these has called
            return original(batch, result, *args, **kwargs)
        rows = [req.rid for req in batch.reqs]
        running = [req for req in batch.reqs if req.rid in self._bridge.requests]
        with self._reports.range("settle", len(batch.reqs), step):
            out = original(batch, result, *args, **kwargs)
        if (accept_lens := _accept_lens(result)) is not None:
            accepted = dict(zip(rows, accept_lens, strict=True))
            for req in running:
                self._reports.verified(req.rid, accepted[req.rid])
        self._reports.settled(step, self._advance(running))
        return out

    def _sent(self, message: Any, *_: Any, **__: Any) -> None:
        """What clients are sent: tokens, log probabilities and ends."""
        if type(message).__name__ == "AbortReq":
            reason = getattr(message, "finished_reason", None) or {}
            text = reason.get("message", "") if isinstance(reason, dict) else str(reason)
            self._reports.end(message.rid, *self._aborted_end(message.rid, text))
        elif (ids := getattr(message, "rids", None)) is not None:
            scores = [getattr(message, name, None) or [()] * len(ids) for name in _SCORES]
            entries = zip(ids, message.finished_reasons, message.output_ids, *scores, strict=True)
            for request_id, reason, tokens, logprobs, of_prompt in entries:
                known = [score for score in of_prompt if score is not None]  # its first token has none
                self._reports.streamed(request_id, tokens, reason is not None, logprobs, known)
                if isinstance(reason, dict) and reason.get("type") == "abort":
                    text = reason.get("message", "")
                    self._reports.end(request_id, *self._aborted_end(request_id, text))


def _kind(mode: Any) -> StepKind:
    if mode.is_mixed():
        return "mixed"
    if mode.is_extend():
        return "prefill"
    return "decode" if mode.is_decode() else "idle"


def _accept_lens(result: Any) -> Sequence[int] | None:
    """How many tokens a verify has accepted of each request, the bonus included; None where there was none."""
    if (lens := getattr(result, "accept_lens", None)) is not None:
        return lens.tolist()  # type: ignore[no-any-return]
    for name in _DRAFTS_ACCEPTED:
        if (drafts := getattr(result, name, None)) is not None:
            return [count + 1 for count in drafts]
    return None
