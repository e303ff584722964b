"""The adapter of mini-sglang: its own scheduler, engine, caches, attention metadata and CUDA graphs.

Replaced are where requests come from, where results go, the process group, the tokenizer, one C++ function on host
tensors, and the model.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch

from ...scenarios.combinations import overlaps
from ...scenarios.schema import Scenario
from ...sched.batch import ForwardBatch, ForwardMode
from ...sched.config import SamplingParams
from ...sched.request import Request, Status
from ..run.compose import engine_config
from ..run.system import System, SystemParts, TagAudit
from ..vgpu.patching import attributes_set
from .adapter import NOT_IN_SMALL_ENGINES, needed
from .bridge import AllEnded, EngineSystem, ranged, wrap_methods
from .model import EngineModel, long, model_folder, process_group_of_one, require_sampling, tokenizer
from .names import ADAPTERS

_REFUSED: Final = {
    **NOT_IN_SMALL_ENGINES,
    "mixed chunk": "batches of prompts and decodes (Scheduler._schedule_next_batch)",
    "pages": "attention by pages (FlashAttentionBackend.prepare_metadata)",
}


class MiniSglangAdapter:
    """See ``EngineAdapter``."""

    package, python_path = ADAPTERS["mini-sglang"]
    own_runner = True
    environment = {"TRITON_INTERPRET": "1"}  # noqa: RUF012
    hollow = (
        *("flashinfer", "modelscope", "openai", "prompt_toolkit", "quack", "sgl_kernel"),
        *("torchaudio", "torchvision", "tvm_ffi"),
    )
    requires = {"transformers": "transformers", "zmq": "pyzmq", "msgpack": "msgpack"}  # noqa: RUF012

    def load(self) -> None:
        for name in ("kernel", "utils", "models", "core", "distributed", "message", "scheduler", "engine"):
            import_module(f"minisgl.{name}")

    def needs(self, scenario: Scenario) -> Sequence[str]:
        return needed(scenario, _REFUSED)

    def open(self, parts: SystemParts) -> System:
        return MiniSglangSystem(parts)


class MiniSglangSystem(EngineSystem):
    def __init__(self, parts: SystemParts) -> None:
        super().__init__(parts)
        self._ids: list[str] = []  # of requests, by the engine's numbers
        self._tokens: dict[int, list[int]] = {}
        self._gone: list[int] = []
        self.overlapped = overlaps(parts.resolved.scenario)
        self.model = DecoderModel(parts)
        self.scheduler = self._opened()
        self._wrap()

    # ---- as a system ---------------------------------------------------------------------------------------

    def run(self) -> None:
        env = import_module("minisgl.env").ENV
        with (
            contextlib.suppress(AllEnded),
            attributes_set([(env, "DISABLE_OVERLAP_SCHEDULING", not self.overlapped)]),
        ):
            torch.cuda.set_stream(self.scheduler.stream)
            self.scheduler.run_forever()

    def forget(self) -> None:
        cache = self.scheduler.cache_manager
        with torch.inference_mode(), torch.cuda.stream(self.scheduler.stream):
            evicted = cache.prefix_cache.evict(cache.prefix_cache.size_info.evictable_size)
            cache.free_slots = torch.cat([cache.free_slots, evicted])

    def abort(self, request: Request, reason: str) -> None:  # noqa: ARG002
        self._gone.append(self._ids.index(request.id))

    def audit(self) -> TagAudit | None:
        if self.model.made is None or self.model.made.tags is None:
            return None
        return TagAudit(self.model.made.tags, self.scheduler.engine.page_table, self._parts.machine.peek)

    # ---- opening -------------------------------------------------------------------------------------------

    def _opened(self) -> Any:
        resolved, machine = self._parts.resolved, self._parts.machine
        config = engine_config(resolved, machine)
        kind = import_module("minisgl.scheduler")
        with (
            tempfile.TemporaryDirectory(prefix="schedbench-model-") as folder,
            attributes_set(self._patches()),
        ):
            chunk = config.chunked_prefill_size
            return kind.Scheduler(
                kind.SchedulerConfig(
                    model_path=str(model_folder(resolved.model, Path(folder))),
                    tp_info=import_module("minisgl.distributed").DistributedInfo(0, 1),
                    dtype=torch.bfloat16,
                    max_running_req=config.max_running_requests,
                    attention_backend="fa",
                    page_size=1,
                    num_page_override=config.kv_tokens,
                    use_dummy_weight=True,
                    cuda_graph_max_bs=config.max_running_requests if config.cuda_graph else 0,
                    max_seq_len_override=config.context_len,
                    max_extend_tokens=config.max_prefill_tokens if chunk is None else chunk,
                    cache_type="radix" if config.radix_cache else "naive",
                    offline_mode=True,
                )
            )

    def _patches(self) -> Iterator[tuple[Any, str, Any]]:
        """While the engine is opened. Offline, its scheduler has no sockets."""
        engine, scheduler = (
            import_module("minisgl.engine.engine"),
            import_module("minisgl.scheduler.scheduler"),
        )
        group = process_group_of_one()
        yield torch.cuda, "is_initialized", lambda: False
        yield engine, "create_model", lambda config: self.model  # noqa: ARG005
        yield engine.Engine, "_init_communication", lambda engine, config: group  # noqa: ARG005
        yield scheduler, "load_tokenizer", lambda path: tokenizer(self._parts.resolved.model)  # noqa: ARG005

    # ---- what the loop calls -------------------------------------------------------------------------------

    def _wrap(self) -> None:
        scheduler = self.scheduler
        kernels: Any = import_module("minisgl.kernel")
        kernels.fast_compare_key = _common_length
        scheduler.receive_msg = self._receive
        scheduler.send_result = self._reply
        wrap_methods(scheduler.prefill_manager, {"schedule_next_batch": ranged(self._reports, "admit")})
        methods = {
            "_prepare_batch": self._prepare,
            "_forward": self._launch,
            "_process_last_data": self._settle,
            "_free_req_resources": self._release,
        }
        wrap_methods(scheduler, methods)
        self._parts.observer.stream("forward", scheduler.engine.stream)
        if (hazards := self._parts.machine.hazards) is not None:
            hazards.name(scheduler.engine.page_table, "page_table")
            hazards.name(scheduler.token_pool, "token_pool")

    def _receive(self, blocking: bool = False) -> list[Any]:
        self._parts.observer.stream("schedule", torch.cuda.current_stream())
        messages = import_module("minisgl.message")
        gone, self._gone = self._gone, []
        for number in gone:
            self._reports.end(self._ids[number], Status.ABORTED, "aborted by its client")
        with self._reports.range("receive", 0):
            arrived = self._reports.due(blocking and not gone)
        return [
            *(messages.AbortBackendMsg(number) for number in gone),
            *(self._message(request) for request in arrived),
        ]

    def _message(self, request: Request) -> Any:
        number, sampling = len(self._ids), request.sampling
        require_sampling(
            sampling, "mini-sglang samples by temperature, top_k and top_p only", "top_k", "top_p"
        )
        self._ids.append(request.id)
        self._tokens[number] = []
        return import_module("minisgl.message").UserMsg(
            number, torch.tensor(list(request.origin_input_ids), dtype=torch.int32), _sampling(sampling)
        )

    def _reply(self, replies: Sequence[Any]) -> None:
        for reply in replies:
            if (tokens := self._tokens.get(reply.uid)) is None:
                continue
            tokens.append(reply.next_token)
            name = self._ids[reply.uid]
            self._reports.advance(name, tokens)
            if reply.finished:
                del self._tokens[reply.uid]
                self._reports.finish(name)

    def _prepare(self, original: Callable[..., Any], batch: Any) -> Any:
        with self._reports.range("prepare", batch.size):
            return original(batch)

    def _launch(self, original: Callable[..., Any], given: Any) -> Any:
        batch = given.batch
        cached = {self._ids[req.uid]: req.cached_len if batch.is_prefill else 0 for req in batch.reqs}
        tokens = sum(req.extend_len for req in batch.reqs)
        self._parts.observer.kv_usage(self._used_tokens())
        step = batch.schedbench_step = self._reports.begin_step(batch.phase, cached, tokens)
        with self._reports.range("publish", batch.size, step):
            out = original(given)
        self._reports.launched(step)
        return out

    def _settle(self, original: Callable[..., Any], last: Any) -> Any:
        if last is None:
            return original(last)
        batch = last[0].batch
        open_before = len(self._bridge.requests)
        with self._reports.range("settle", batch.size, batch.schedbench_step):
            out = original(last)
        self._reports.settled(batch.schedbench_step, len(self._bridge.requests) < open_before)
        return out

    def _release(self, original: Callable[..., Any], req: Any) -> Any:
        tokens = self._tokens.get(req.uid)
        request = self._bridge.requests.get(self._ids[req.uid])
        if tokens is not None and request is not None and not req.can_decode:
            known = len(request.origin_input_ids)
            self._reports.advance(request.id, req.input_ids[known:].tolist())
            self._reports.ending(request.id, req.table_idx)
        return original(req)

    def _used_tokens(self) -> int:
        cache = self.scheduler.cache_manager
        return int(cache.num_pages - cache.available_size)


class DecoderModel:
    """Schedbench's decoder in the place of mini-sglang's model. It finds KV where mini-sglang's attention does: in the
    table that is gathered for each batch."""

    def __init__(self, parts: SystemParts) -> None:
        self._parts = parts
        self.made: EngineModel | None = None

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {}

    def load_state_dict(self, state: Any) -> None:  # noqa: ARG002
        self.made = EngineModel(self._parts)
        rows = self.made.config.max_running_requests + 1
        self._rows = torch.arange(rows, device=self.made.config.device)

    def forward(self) -> torch.Tensor:
        """The logits [b, vocab] of the batch in mini-sglang's context."""
        assert self.made is not None
        batch = import_module("minisgl.core").get_global_ctx().batch
        found = batch.attn_metadata
        size = found.cache_seqlens.shape[0]
        extends = batch.is_prefill
        ends = found.cu_seqlens_q
        new = ends[1:] - ends[:-1] if extends else None
        decoder = self.made.decoder(found.page_table)
        output = decoder.forward(
            ForwardBatch(
                mode=ForwardMode.EXTEND if extends else ForwardMode.DECODE,
                input_ids=long(batch.input_ids),
                positions=long(batch.positions),
                req_pool_indices=self._rows[:size],
                seq_lens=long(found.cache_seqlens),
                out_cache_loc=long(batch.out_loc),
                max_seq_len=found.max_seqlen_k,
                extend_lens=new,
                extend_prefix_lens=None if new is None else found.cache_seqlens - new,
                max_extend_len=found.max_seqlen_q,
            )
        )
        return output.logits


def _sampling(given: SamplingParams) -> Any:
    return import_module("minisgl.core").SamplingParams(
        temperature=given.temperature,
        top_k=given.top_k or -1,
        top_p=given.top_p,
        ignore_eos=given.ignore_eos,
        max_tokens=given.max_new_tokens,
    )


def _common_length(a: torch.Tensor, b: torch.Tensor) -> int:
    """How many of the first entries of two host tensors are equal."""
    length = min(len(a), len(b))
    differ = (a[:length] != b[:length]).nonzero()
    return int(differ[0]) if len(differ) else length


ADAPTER = MiniSglangAdapter()
