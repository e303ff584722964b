"""SGLang's own ``Scheduler`` as the system of a run.

Replaced are where requests come from, where results go, the groups of processes, and the model (``runner.py``). The
loop, batches, caches, relay and sampler are SGLang's, unchanged; steps and ranges are read by wrapping the methods that
the loop calls.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch

from ....scenarios.combinations import MODES
from ....sched.data_parallel.sync import RankShare
from ....sched.link import FOREVER, LinkError
from ....sched.model.config import ModelConfig
from ....sched.observe import StepInfo, StepKind, StreamName
from ....sched.pipeline.stage import Stage
from ....sched.relay.choice import loop_of
from ....sched.request import Request, Status
from ...platform.resolve import speculative_config
from ...record.provenance import NO_RELAY, RelayPart
from ...run.compose import engine_config
from ...run.observers import TagAudit
from ...run.system import System, SystemParts
from ..bridge import AllEnded, EndOfRequest, RunBridge
from ..model import model_folder
from ..names import EngineError
from ..turns import TurnLink
from .arguments import aborted, server_args, tokenized
from .chunk_sizes import require_curve, timed_virtually
from .data_ranks import group_of_ranks, require_shares, synchronised
from .eagle import wrap_worker
from .edge import fake_transfers, fitted, groups_of_one
from .grammar import install_grammars
from .own_runner import OwnRunner
from .runner import RunnerStub
from .transfer import HOST, KVTransfers

_STREAMS: Final[Sequence[StreamName]] = ("forward", "copy")

# Methods of a prefix cache that get a request whose KV is about to be released, from old to new.
_RELEASES: Final = ("cache_finished_req", "claim_kv_row")
_QUIET_TURNS: Final = 2  # of the loop, after which a worker whose requests all wait has nothing left to do
# What the serial worker of speculation says of each request, without the bonus, from old to new.
_DRAFTS_ACCEPTED: Final = ("accept_length_per_req_cpu", "num_correct_drafts_per_req_cpu")
# Where requests are that are in no batch: those whose grammars are compiled, and those of a worker of a pair.
_QUEUES: Final = (
    *("grammar_queue", "grammar_manager"),
    *("disagg_prefill_bootstrap_queue", "disagg_prefill_inflight_queue"),
    *("disagg_decode_prealloc_queue", "disagg_decode_transfer_queue"),
)


class SglangSystem(System):
    def __init__(self, parts: SystemParts) -> None:
        self._parts = parts
        self._role = None if parts.context.place is None else parts.context.place.role
        self._stage, self._share = parts.context.stage, parts.context.share
        self._data_rank = 0 if self._share is None else self._share.rank
        # The first stage sends aborts on, and so does a decode worker.
        sends_prompts = self._role == "prefill" and parts.context.link is not None
        self.aborts = not sends_prompts and (self._stage is None or self._stage.is_first)
        self._turns = 0  # of the loop since the last step
        self._spec = speculative_config(parts.resolved.scenario.engine.speculative)
        self.simulated = self._spec is not None and self._spec.acceptance is not None
        self._bridge = RunBridge(parts, speculates=self._spec is not None)
        self._reports = parts.machine.host.excluded(self._bridge)  # its methods, which take no host time
        self._gone: list[Any] = []  # messages of clients that have gone
        self._aborted: set[str] = set()  # their requests
        runner = OwnRunner if MODES["own model runner"].on(parts.resolved.scenario) else RunnerStub
        self.runner = runner(parts, self._bridge, self._reports)
        self.defaults = self.runner.defaults
        self._transfers = self._linked(parts)
        self.scheduler = self._opened()
        if self._transfers is not None:
            self._transfers.bind(self._model_runner.engine_model.port())
        self.scheduler.tokenizer = _Tokenizer(parts.resolved.model)
        if MODES["grammar"].on(parts.resolved.scenario):
            install_grammars(self.scheduler, parts.resolved.model)
        self._wrap_batches()
        self._wrap_scheduler()
        self._name()

    # ---- as a system ---------------------------------------------------------------------------------------

    @property
    def next_step(self) -> int:
        return self._bridge.next_step

    def relay_part(self) -> RelayPart:
        loop = loop_of(overlap=self.scheduler.enable_overlap, staged=self._stage is not None)
        return RelayPart(state=NO_RELAY, loop=loop)

    def run(self) -> None:
        scheduler, self._named = self.scheduler, False
        with contextlib.suppress(AllEnded):
            if hasattr(scheduler, "run_event_loop"):
                scheduler.run_event_loop()
            else:
                loop = "event_loop_overlap" if scheduler.enable_overlap else "event_loop_normal"
                loop = loop if self._stage is None else "event_loop_pp"
                getattr(scheduler, loop if self._role is None else f"{loop}_disagg_{self._role}")()

    def forget(self) -> None:
        self._aborted.clear()
        if self._transfers is not None:
            self._transfers.forget()
        self.scheduler.flush_cache()

    def abort(self, request: Request, reason: str) -> None:  # noqa: ARG002
        self._gone.append(aborted(request.id))
        self._aborted.add(request.id)

    def unfinished(self) -> Sequence[Request]:
        return list(self._bridge.requests.values())

    def audit(self) -> TagAudit | None:
        runner = self._model_runner
        tags = runner.engine_model.tags
        if tags is None:
            return None
        return TagAudit(tags, runner.req_to_token_pool.req_to_token, self._parts.machine.peek)

    # ---- opening -------------------------------------------------------------------------------------------

    def _linked(self, parts: SystemParts) -> KVTransfers | None:
        """The transfers of a worker that has a link to the others."""
        link, place = parts.context.link, parts.context.place
        if place is None or link is None:
            return None
        assert isinstance(link, TurnLink)
        return KVTransfers(parts, link, place, self._bridge)

    def _opened(self) -> Any:
        module = import_module("sglang.srt.managers.scheduler")
        resolved, machine = self._parts.resolved, self._parts.machine
        if self._transfers is not None:
            self._transfers.install()
        elif self._role is not None:
            fake_transfers()
        with tempfile.TemporaryDirectory(prefix="schedbench-model-") as folder:
            model = model_folder(resolved.model, Path(folder))
            config = engine_config(resolved, machine)
            args = server_args(resolved, config, model, self._role)
            rank = 0 if self._stage is None else self._stage.index
            if not _published(module, args, self._stage, self._share, self.runner.defaults):
                groups_of_one(self.runner.defaults, self._stage)
                with contextlib.suppress(ImportError):
                    servers = import_module("sglang.srt.server_args")
                    getattr(servers, "set_global_server_args_for_scheduler", lambda _: None)(args)
            self.runner.install()
            if self._share is not None:
                synchronised(self._parts, self._share)
            dynamic = MODES["dynamic chunks"].on(resolved.scenario)
            warnings = timed_virtually(self._parts) if dynamic else ()
            ports = import_module("sglang.srt.server_args").PortArgs.init_new(args)
            scheduler = fitted(
                module.Scheduler,
                server_args=args,
                port_args=ports,
                gpu_id=0,
                tp_rank=self._data_rank,
                moe_ep_rank=0,
                pp_rank=rank,
                attn_cp_rank=0,
                moe_dp_rank=0,
                dp_rank=None if self._share is None else self._share.rank,
            )
            if self._share is not None:
                require_shares(scheduler, args, config)
            if dynamic:
                require_curve(scheduler, warnings)
            return scheduler

    @property
    def _model_runner(self) -> Any:
        return self.scheduler.tp_worker.model_runner

    def _name(self) -> None:
        """Name what steps share, for findings."""
        hazards = self._parts.machine.hazards
        if hazards is None:
            return
        runner = self._model_runner
        hazards.name(runner.req_to_token_pool.req_to_token, "req_to_token")
        relay = getattr(self.scheduler, "future_map", None)
        for name, value in vars(relay).items() if relay is not None else ():
            if isinstance(value, torch.Tensor) and value.is_cuda:
                hazards.name(value, name)

    def _name_streams(self) -> None:
        """Called in the loop, whose current stream is the schedule stream."""
        observer = self._parts.observer
        for name in _STREAMS:
            if (stream := getattr(self.scheduler, f"{name}_stream", None)) is not None:
                observer.stream(name, stream)
        observer.stream("schedule", torch.cuda.current_stream())

    @property
    def _decode_kind(self) -> StepKind:
        return "decode" if self._spec is None else "verify"

    # ---- what the loop calls -------------------------------------------------------------------------------

    def _wrap_scheduler(self) -> None:
        scheduler = self.scheduler
        receiver = getattr(scheduler, "request_receiver", None)
        holder = scheduler if receiver is None else receiver
        receive = functools.partial(self._receive, holder.recv_requests)
        if receiver is None:
            scheduler.recv_requests = receive
        else:
            scheduler.request_receiver = _Receiver(receiver, receive)
        for name, around in (
            ("get_next_batch_to_run", self._plan),
            ("get_new_batch_prefill", self._admit),
            ("run_batch", self._launch),
            ("process_batch_result", self._settle),
            # of workers of a pair
            ("get_next_disagg_prefill_batch_to_run", self._plan),
            ("get_next_disagg_decode_batch_to_run", self._plan),
            ("process_decode_queue", self._preallocate),
            ("process_batch_result_disagg_prefill", self._settle),
            ("process_disagg_prefill_inflight_queue", self._end_sent),
        ):
            if hasattr(scheduler, name):
                setattr(scheduler, name, functools.partial(around, getattr(scheduler, name)))
        if self._spec is not None:
            wrap_worker(scheduler.draft_worker, self._bridge, self._reports)
        cache = scheduler.tree_cache
        name = next(name for name in _RELEASES if hasattr(cache, name))
        setattr(cache, name, functools.partial(self._release, getattr(cache, name)))
        self._capture_outputs()

    def _wrap_batches(self) -> None:
        kind = import_module("sglang.srt.managers.schedule_batch").ScheduleBatch
        for name, around in (
            ("prepare_for_extend", self._prepare("prefill")),
            ("prepare_for_decode", self._prepare(self._decode_kind)),
            ("mix_with_running", self._mix),
            ("retract_decode", self._retract),
            # of a decode worker, from old to new
            ("prepare_for_prebuilt_extend", self._prebuild),
            ("process_prebuilt_extend", self._conclude),
            ("prepare_for_prebuilt", self._prebuild),
            ("process_prebuilt", self._conclude),
        ):
            if hasattr(kind, name):
                setattr(kind, name, _method(around, getattr(kind, name)))

    def _capture_outputs(self) -> None:
        """Take the messages that would go to clients: of them, the ends of requests that never ran."""
        channels = getattr(self.scheduler, "ipc_channels", self.scheduler)
        for name in ("send_to_tokenizer", "send_to_detokenizer"):
            getattr(channels, name).send_output = self._sent

    def _receive(self, original: Callable[..., list[Any]], *args: Any, **kwargs: Any) -> list[Any]:
        scheduler = self.scheduler
        if not self._named:
            self._name_streams()
            self._named = True
        with self._reports.range("receive", 0):
            busy = bool(scheduler.waiting_queue or self._gone or self._launches())
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

    def _queued(self, name: str) -> bool:
        queue = getattr(self.scheduler, name, None)
        return bool(getattr(queue, "queue", queue))

    def _plan(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Everything of the next step that is in no other range, such as the removal of rows that have ended."""
        with self._reports.range("plan", 0):
            return original(*args, **kwargs)

    def _admit(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._reports.range("admit", len(self.scheduler.waiting_queue)):
            return original(*args, **kwargs)

    def _preallocate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Rows and pages for the KV that a decode worker will get."""
        with self._reports.between_steps("admit", len(self.scheduler.waiting_queue)):
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
        cached = {req.rid: int(req.cached_tokens) for req in batch.reqs}
        kind = _kind(batch.forward_mode)
        self._reports.kv_usage(self._used_tokens())
        tokens = int(batch.extend_num_tokens or 0)
        if kind == "decode":
            kind, tokens = self._decode_kind, len(cached) * (self._spec.draft_tokens if self._spec else 1)
        orchestrator = getattr(batch.sampling_info, "penalizer_orchestrator", None)
        penalised = bool(getattr(orchestrator, "is_required", False))
        step = self._reports.begin_step(cached)
        with self._reports.range("publish", len(cached), step):
            result = original(batch, *args, **kwargs)
        info = StepInfo(step, kind, len(cached), tokens, steady=False)
        self._reports.launched(info, list(cached), penalised)
        # A stage of a pipeline settles another result, of the same batch.
        (result if self._stage is None else batch).schedbench_step = step
        return result

    def _prebuild(self, original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        """A decode worker's batch of prompts whose KV has come: a step without a forward, which settles at once."""
        self._reports.planned("prebuilt")
        batch.schedbench_step = self._reports.begin_step(
            {req.rid: int(req.cached_tokens) for req in batch.reqs}
        )
        with self._reports.range("prepare", len(batch.reqs), batch.schedbench_step):
            return original(batch, *args, **kwargs)

    def _conclude(self, original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        step, reqs = batch.schedbench_step, list(batch.reqs)
        with self._reports.range("prepare", len(reqs), step):
            out = original(batch, *args, **kwargs)
        info = StepInfo(step, "prebuilt", len(reqs), 0, steady=False)
        self._reports.launched(info, [req.rid for req in reqs], False)
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
            self._reports.end(req.rid, _end(req.finished_reason))
        return bool(ended)

    def _used_tokens(self) -> int:
        pool, cache = self.scheduler.token_to_kv_pool_allocator, self.scheduler.tree_cache
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
        """The end of a request that was refused or aborted before it ran."""
        if type(message).__name__ == "AbortReq":
            reason = getattr(message, "finished_reason", None) or {}
            text = reason.get("message", "") if isinstance(reason, dict) else str(reason)
            self._reports.end(message.rid, EndOfRequest(Status.ABORTED, text or "aborted by its client"))
        elif (ids := getattr(message, "rids", None)) is not None:
            for request_id, reason in zip(ids, message.finished_reasons, strict=True):
                if isinstance(reason, dict) and reason.get("type") == "abort":
                    status = Status.ABORTED if request_id in self._aborted else Status.REFUSED
                    self._reports.end(request_id, EndOfRequest(status, reason.get("message", "")))


def _method(around: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(batch: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original, batch, *args, **kwargs)

    return method


def _kind(mode: Any) -> StepKind:
    if mode.is_mixed():
        return "mixed"
    if mode.is_extend():
        return "prefill"
    return "decode" if mode.is_decode() else "idle"


def _end(reason: Any) -> EndOfRequest:
    name = type(reason).__name__
    if name == "FINISH_LENGTH":
        return EndOfRequest(Status.FINISHED, "length")
    if name == "FINISH_ABORT":
        return EndOfRequest(Status.ABORTED, getattr(reason, "message", "") or "aborted by its client")
    return EndOfRequest(Status.FINISHED, "stop")


def _accept_lens(result: Any) -> Sequence[int] | None:
    """How many tokens a verify has accepted of each request, the bonus included; None where there was none."""
    if (lens := getattr(result, "accept_lens", None)) is not None:
        return lens.tolist()  # type: ignore[no-any-return]
    for name in _DRAFTS_ACCEPTED:
        if (drafts := getattr(result, name, None)) is not None:
            return [count + 1 for count in drafts]
    return None


def _published(
    module: Any, args: Any, stage: Stage | None, share: RankShare | None, defaults: set[str]
) -> bool:
    """Publish the configuration for the process, as later versions do; returns whether this one does."""
    if not hasattr(module, "SpawnRanks"):
        if share is not None:
            raise EngineError(
                "data-parallel ranks of this SGLang need groups of processes (initialize_dp_attention)"
            )
        return False
    data = None if share is None else share.rank
    rank = module.spawn_world_rank(args, tp_rank=data or 0, pp_rank=0 if stage is None else stage.index)
    module.publish(args, role="scheduler", ranks=module.SpawnRanks(world_rank=rank, dp_rank=data, gpu_id=0))
    one = groups_of_one(defaults, stage)
    parallel = import_module("sglang.srt.runtime_context").get_parallel()
    if hasattr(parallel, "override_permanently"):
        groups = [name for name in dir(type(parallel)) if name.endswith("_group")]
        stages = import_module("sglang.srt.distributed.parallel_state")._PP
        own = {"pp_group": stages} | ({} if share is None else {"tp_group": group_of_ranks(share, defaults)})
        parallel.override_permanently(**dict.fromkeys(groups, one) | own)
    module.bootstrap.init_parallel_runtime = lambda **_: None
    return True


class _Tokenizer:
    """What finish checks and penalties ask of the tokenizer, which nothing else uses."""

    additional_stop_token_ids = None

    def __init__(self, model: ModelConfig) -> None:
        self.eos_token_id = next(iter(model.eos_token_ids), -1)


class _Receiver:
    """SGLang's receiver with other requests."""

    def __init__(self, receiver: Any, receive: Callable[..., list[Any]]) -> None:
        self._receiver = receiver
        self.recv_requests = receive

    def __getattr__(self, name: str) -> Any:
        return getattr(self._receiver, name)
