"""The adapter of vLLM: its own engine core, scheduler, block pool, model runner, attention metadata, CUDA graphs and
sampler.

Replaced are where requests come from, where results go, the worker and its process groups, and the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor

from ...scenarios.combinations import overlaps
from ...scenarios.schema import Scenario
from ...sched.observe import NO_STEP, StepKind
from ...sched.request import Request, Status
from ..run.system import System, SystemParts
from ..vgpu.fused import run_as_one_kernel
from ..vgpu.tensor import wrap
from .adapter import NOT_IN_SMALL_ENGINES, needed
from .bridge import AllEnded, ranged, wrap_methods
from .names import ADAPTERS
from .paged import PagedModel, PagedSystem
from .vllm_core import open_core, vllm_sampling

_REQUIRES: Final = (
    "cachetools cbor2 cloudpickle cpuinfo msgspec openai openai_harmony transformers uvloop zmq"
)
_PIP_NAMES: Final = {"cpuinfo": "py-cpuinfo", "openai_harmony": "openai-harmony", "zmq": "pyzmq"}
_REFUSED: Final = {
    **NOT_IN_SMALL_ENGINES,
    "speculation": "drafts of vLLM's own models (init_speculator)",
    "pipeline": "groups of several stages (PPHandler)",
    "hisparse": "vLLM's own sparse attention (init_hisparse_kv_cache)",
    "data-parallel ranks": "ranks that agree on their batches (dispatch_cg_and_sync_dp)",
    "disaggregation": "a KV connector (get_kv_connector)",
    "no mixed chunk": "another scheduler (Scheduler.schedule mixes prompts and decodes)",
    "controls": "messages to pause and to flush (EngineCoreProc)",
    "embedding": "a pooling model (PoolingRunner)",
    "encoder-decoder": "an encoder (EncoderDecoderModelState)",
    "block diffusion": "a diffusion model (DiffusionScheduler)",
    "prompt logprobs": "log probabilities of prompts (PromptLogprobsWorker), which are not read",
    "grammar": "compiled grammars (StructuredOutputManager)",
}


class VllmAdapter:
    """See ``EngineAdapter``."""

    package, python_path = ADAPTERS["vllm"]
    own_runner = True
    environment = {  # noqa: RUF012
        "TRITON_INTERPRET": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }
    hollow = (
        *(
            "vllm._C",
            "vllm._C_stable_libtorch",
            "vllm._moe_C",
            "vllm.cumem_allocator",
            "vllm.vllm_flash_attn",
        ),
        *("_C", "_moe_C", "cv2", "flashinfer", "mistral_common", "torchaudio", "torchvision", "xgrammar"),
    )
    requires = {name: _PIP_NAMES.get(name, name) for name in _REQUIRES.split()}  # noqa: RUF012

    def load(self) -> None:
        platforms: Any = import_module("vllm.platforms")
        platforms._current_platform = import_module("vllm.platforms.cuda").NonNvmlCudaPlatform()
        # A checkout has no version; by it vLLM recognises builds for the CPU, which need another Triton.
        platforms.vllm_version_matches_substr = lambda _: False
        # Kernels read pinned memory of the host by its address there.
        utilities: Any = import_module("vllm.utils.torch_utils")
        utilities.get_accelerator_view_from_cpu_tensor = wrap
        for name in (
            "engine.arg_utils",
            "model_executor.layers.attention",
            "v1.attention.backends.triton_attn",
            "v1.core.sched.async_scheduler",
            "v1.engine.core",
            "v1.executor.uniproc_executor",
            "v1.worker.gpu.model_runner",
        ):
            import_module(f"vllm.{name}")

    def needs(self, scenario: Scenario) -> Sequence[str]:
        return needed(scenario, _REFUSED, pages=(16, "TritonAttentionBackend"))

    def open(self, parts: SystemParts) -> System:
        return VllmSystem(parts)


class VllmSystem(PagedSystem):
    def __init__(self, parts: SystemParts) -> None:
        super().__init__(parts)
        self.overlapped = overlaps(parts.resolved.scenario)
        self._gone: list[tuple[str, str]] = []  # requests that were aborted, with the reasons
        torch.cuda.set_stream(
            torch.cuda.Stream()
        )  # as vLLM does, since a graph cannot be captured on the default one
        self.model = PagedModel(parts, spare=0)  # of its first block, which no request gets
        self._core, self._runner = open_core(
            parts.resolved.model,
            self._config,
            overlapped=self.overlapped,
            forward=self.forward,
            logits=self.model.logits,
        )
        self._scheduler = self._core.scheduler
        self._bridge.streams = True
        self._wrap()

    # ---- as a system ---------------------------------------------------------------------------------------

    def run(self) -> None:
        """What ``EngineCoreProc.run_busy_loop`` does."""
        self._parts.observer.stream("schedule", torch.cuda.current_stream())
        core = self._core
        with contextlib.suppress(AllEnded):
            while True:
                self._receive()
                if self._busy():
                    outputs, executed = core.step_fn()
                    self._reply(outputs or {})
                    core.post_step(executed)

    def forget(self) -> None:
        self._scheduler.reset_prefix_cache()

    def abort(self, request: Request, reason: str) -> None:
        self._gone.append((request.id, reason))

    # ---- requests ------------------------------------------------------------------------------------------

    def _busy(self) -> bool:
        return bool(self._scheduler.has_requests() or self._core.batch_queue)

    def _receive(self) -> None:
        gone, self._gone = self._gone, []
        self._core.abort_requests([name for name, _ in gone])
        for name, reason in gone:
            self._reports.end(name, Status.ABORTED, reason)
        with self._reports.range("receive", 0):
            arrived = self._reports.due(not self._busy())
        made = import_module("vllm.v1.request").Request
        for request in arrived:
            self._core.add_request(
                made(
                    request.id,
                    list(request.origin_input_ids),
                    vllm_sampling(request.sampling, self._parts.resolved.model.eos_token_ids),
                    None,
                    arrival_time=self._parts.clock.now(),
                    block_hasher=self._core.request_block_hasher,
                )
            )

    def _reply(self, outputs: Mapping[int, Any]) -> None:
        """What clients are sent, and the ends of requests; tokens are reported as the scheduler applies them. A request
        that vLLM aborts without a client's message has failed."""
        for output in (output for group in outputs.values() for output in group.outputs):
            ended = output.finish_reason is not None
            self._reports.streamed(output.request_id, output.new_token_ids, ended)
            if ended:
                reason = str(output.finish_reason)
                status = Status.FAILED if reason in ("abort", "error") else Status.FINISHED
                self._reports.end(output.request_id, status, reason)

    # ---- what a step calls ---------------------------------------------------------------------------------

    def _wrap(self) -> None:
        scheduler, runner = self._scheduler, self._runner
        of_scheduler: dict[str, Callable[..., Any]] = {
            "schedule": ranged(self._reports, "admit"),
            "update_from_output": self._settle,
            "_preempt_request": self._preempt,
            "_free_request": self._release,
        }
        wrap_methods(scheduler, of_scheduler)
        wrap_methods(runner, {"execute_model": self._execute, "sample_tokens": self._sample})
        wrap_methods(runner.sampler, {"sample": self._tag})
        wrap_methods(runner.cudagraph_manager, {"run_fullgraph": self._replay})
        if self.model.made.tags is not None:
            gumbel: Any = import_module("vllm.v1.worker.gpu.sample.gumbel")
            gumbel._gumbel_sample_kernel = _GumbelWithoutValues()
        self._parts.observer.stream("copy", runner.output_copy_stream)

    def _execute(self, original: Callable[..., Any], output: Any, *args: Any, **kwargs: Any) -> Any:
        if not output.total_num_scheduled_tokens:
            return original(output, *args, **kwargs)
        pool = self._scheduler.kv_cache_manager.block_pool
        used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        self._parts.observer.kv_usage(used * self._config.page_size)
        names, tokens = list(output.num_scheduled_tokens), output.total_num_scheduled_tokens
        cached = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        rows = {name: cached.get(name, 0) for name in names}
        step = output.schedbench_step = self._reports.begin_step(self._kind(output), rows, tokens)
        with self._reports.range("prepare", len(names), step):
            return original(output, *args, **kwargs)

    def _kind(self, output: Any) -> StepKind:
        """A row is of a prompt if it is new or has several tokens, or has not had all of its prompt before."""
        prompts = {new.req_id for new in output.scheduled_new_reqs}
        known = output.scheduled_cached_reqs
        for name, computed in zip(known.req_ids, known.num_computed_tokens, strict=True):
            request = self._scheduler.requests[name]
            if output.num_scheduled_tokens[name] > 1 or computed < request.num_prompt_tokens:
                prompts.add(name)
        if not prompts:
            return "decode"
        return "prefill" if len(prompts) == len(output.num_scheduled_tokens) else "mixed"

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """The hidden states [T, hidden] of the batch in vLLM's context."""
        context = import_module("vllm.forward_context").get_forward_context().attn_metadata
        if context is None:  # a warm-up without attention
            return torch.zeros(
                len(input_ids), self.model.made.hidden[0], dtype=torch.bfloat16, device=input_ids.device
            )
        found = next(iter(context.values()))
        decodes = found.max_query_len == 1 and len(found.seq_lens) == len(input_ids)
        starts = None if decodes else found.query_start_loc
        places = (found.slot_mapping, starts, found.seq_lens, found.block_table)
        with self._reports.range("model", len(found.seq_lens), self._bridge.step):
            return self.model.hidden(input_ids, positions, *places, found.max_seq_len, found.max_query_len)

    def _replay(self, original: Callable[..., Any], description: Any) -> Any:
        self.model.replayed = description.num_reqs
        with self._reports.range("model", description.num_reqs, self._bridge.step):
            return original(description)

    def _tag(self, original: Callable[..., Any], logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        ids, processed = original(logits, *args, **kwargs)
        return self.model.sampled(logits, ids), processed

    def _sample(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        step = self._bridge.step
        with self._reports.range("sample", 0, step):
            output = original(*args, **kwargs)
        wrap_methods(output, {"get_output": ranged(self._reports, "settle", step=lambda: step)})
        self._reports.launched(step)
        return output

    def _settle(self, original: Callable[..., Any], scheduled: Any, *args: Any) -> Any:
        step = getattr(scheduled, "schedbench_step", NO_STEP)
        rows = [self._scheduler.requests.get(name) for name in scheduled.num_scheduled_tokens]
        before = len(self._scheduler.requests)
        with self._reports.range("settle", len(rows), step):
            outputs = original(scheduled, *args)
            for row in rows:
                if row is not None:
                    self._reports.advance(row.request_id, row.output_token_ids)
        if step != NO_STEP:
            self._reports.settled(step, len(self._scheduler.requests) < before)
        return outputs

    def _preempt(self, original: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> None:
        self._reports.retracted(request.request_id)
        original(request, *args, **kwargs)

    def _release(self, original: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
        name = request.request_id
        if name in self._bridge.requests:
            self._reports.advance(name, request.output_token_ids)
            self._ending(name, self._scheduler.kv_cache_manager.get_block_ids(name)[0])
        return original(request, *args, **kwargs)


class _GumbelWithoutValues:
    """With values none, in the place of vLLM's Triton kernel that chooses tokens: one launch that reads the logits. The
    tokens follow from the KV tags, whatever it writes."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **_: run_as_one_kernel(
            "_gumbel_sample_kernel", _largest, args[10], args[2], args[0]
        )


def _largest(logits: Tensor, maxima: Tensor, ids: Tensor) -> None:
    maxima.copy_(logits.amax(1, keepdim=True).expand_as(maxima))
    ids.zero_()


ADAPTER = VllmAdapter()
