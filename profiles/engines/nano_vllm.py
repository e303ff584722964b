"""The adapter of nano-vllm: its own scheduler, block manager, inputs of a step, CUDA graphs and sampler.

Replaced are where requests come from, where results go, the process group, the size of the KV cache, and the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor

from ...scenarios.schema import Scenario
from ...sched.config import SamplingParams
from ...sched.request import Request
from ..run.system import System, SystemParts
from ..vgpu.patching import attributes_set
from .adapter import NOT_IN_SMALL_ENGINES, needed
from .bridge import AllEnded, ranged, wrap_methods
from .model import require_sampling
from .names import ADAPTERS, EngineError
from .paged import PagedModel, PagedSystem

# Its sampler divides logits by the temperature, and refuses less: the largest logit keeps all of the probability.
_GREEDY: Final = 1e-9
_REFUSED: Final = {
    **NOT_IN_SMALL_ENGINES,
    "overlap": "an overlapped loop (LLMEngine.step): engine.overlap=false",
    "mixed chunk": "batches of prompts and decodes (Scheduler.schedule): engine.mixed_chunk=false",
    "no radix cache": "a block manager without one (BlockManager.can_allocate)",
    "unchunked prefill": "prompts larger than a batch (Scheduler.schedule cuts them)",
}


class NanoVllmAdapter:
    """See ``EngineAdapter``."""

    package, python_path = ADAPTERS["nano-vllm"]
    own_runner = True
    environment = {"TRITON_INTERPRET": "1"}  # noqa: RUF012
    hollow = ("flash_attn", "tqdm")
    requires = {"transformers": "transformers", "xxhash": "xxhash"}  # noqa: RUF012

    def load(self) -> None:
        import_module("nanovllm.engine.llm_engine")

    def needs(self, scenario: Scenario) -> Sequence[str]:
        return needed(scenario, _REFUSED, pages=(256, "Config.__post_init__"))

    def open(self, parts: SystemParts) -> System:
        return NanoVllmSystem(parts)


class NanoVllmSystem(PagedSystem):
    aborts = False

    def __init__(self, parts: SystemParts) -> None:
        super().__init__(parts)
        self._ids: dict[int, str] = {}  # of requests, by the engine's numbers
        self.model = NanoVllmModel(parts, self._config.kv_tokens)
        self._engine = self._opened()
        self._wrap()

    # ---- as a system ---------------------------------------------------------------------------------------

    def run(self) -> None:
        """What ``LLMEngine.generate`` does, with requests as they arrive."""
        self._parts.observer.stream("schedule", torch.cuda.current_stream())
        scheduler = self._engine.scheduler
        with contextlib.suppress(AllEnded):
            while True:
                with self._reports.range("receive", 0):
                    arrived = self._reports.due(scheduler.is_finished())
                for request in arrived:
                    scheduler.add(self._sequence(request))
                if not scheduler.is_finished():
                    self._engine.step()

    def forget(self) -> None:
        blocks = self._engine.scheduler.block_manager
        blocks.hash_to_block_id.clear()
        for block in blocks.blocks:
            block.hash = -1

    def abort(self, request: Request, reason: str) -> None:  # noqa: ARG002
        raise EngineError("nano-vllm cannot abort a request (LLMEngine)")

    # ---- opening -------------------------------------------------------------------------------------------

    def _opened(self) -> Any:
        """An ``LLMEngine`` without tokenizer and processes of other ranks."""
        engines = import_module("nanovllm.engine.llm_engine")
        runners, module = (import_module(f"nanovllm.{name}") for name in ("engine.model_runner", "config"))
        config, model = self._config, self._parts.resolved.model
        sizes = SimpleNamespace(
            dtype=model.dtype, hidden_size=model.hidden_size, max_position_embeddings=model.max_positions
        )
        with attributes_set([(module, "AutoConfig", SimpleNamespace(from_pretrained=lambda _: sizes))]):
            asked = module.Config(
                str(Path(__file__).parent),  # has to be a folder; nothing is read from it
                max_num_batched_tokens=config.chunked_prefill_size,
                max_num_seqs=config.max_running_requests,
                max_model_len=config.context_len,
                enforce_eager=not config.cuda_graph,
                eos=next(iter(model.eos_token_ids), -1),
                kvcache_block_size=config.page_size,
                num_kvcache_blocks=config.kv_tokens // config.page_size,
            )
        import_module("nanovllm.engine.sequence").Sequence.block_size = config.page_size
        engine = object.__new__(engines.LLMEngine)
        with attributes_set(self._patches(runners)):
            engine.model_runner = runners.ModelRunner(asked, 0, [])
        engine.scheduler = engines.Scheduler(asked)
        return engine

    def _patches(self, runners: Any) -> Iterator[tuple[Any, str, Any]]:
        """While the engine is opened. Its KV cache is as large as the scenario's, without trying how much fits."""
        kind = runners.ModelRunner
        yield runners, "dist", SimpleNamespace(init_process_group=lambda *_, **__: None)
        yield runners, "Qwen3ForCausalLM", lambda config: self.model  # noqa: ARG005
        yield runners, "load_model", lambda model, path: None  # noqa: ARG005
        yield kind, "warmup_model", lambda runner: None  # noqa: ARG005
        yield kind, "allocate_kv_cache", lambda runner: None  # noqa: ARG005

    # ---- what a step calls ---------------------------------------------------------------------------------

    def _wrap(self) -> None:
        runner, scheduler = self._engine.model_runner, self._engine.scheduler
        of_scheduler: dict[str, Callable[..., Any]] = {
            "schedule": ranged(self._reports, "admit"),
            "postprocess": self._settle,
            "preempt": self._preempt,
        }
        wrap_methods(scheduler, of_scheduler)
        wrap_methods(scheduler.block_manager, {"deallocate": self._release})
        prepare = ranged(self._reports, "prepare", step=lambda: self._bridge.step)
        model = ranged(self._reports, "model", step=lambda: self._bridge.step)
        of_runner = {"prepare_prefill": prepare, "prepare_decode": prepare, "run_model": model}
        wrap_methods(runner, {"run": self._launch, "sampler": self._sample, **of_runner})

    def _sequence(self, request: Request) -> Any:
        engine = import_module("nanovllm.engine.sequence")
        made = engine.Sequence(list(request.origin_input_ids), _sampling(request.sampling))
        self._ids[made.seq_id] = request.id
        return made

    def _launch(self, original: Callable[..., Any], seqs: Sequence[Any], is_prefill: bool) -> Any:
        blocks = self._engine.scheduler.block_manager
        self._parts.observer.kv_usage(len(blocks.used_block_ids) * blocks.block_size)
        cached = {self._ids[seq.seq_id]: seq.num_cached_tokens if is_prefill else 0 for seq in seqs}
        tokens = sum(seq.num_scheduled_tokens for seq in seqs)
        step = self._reports.begin_step("prefill" if is_prefill else "decode", cached, tokens)
        with self._reports.range("settle", len(seqs), step):  # what no other range has: tokens are read
            return original(seqs, is_prefill)

    def _sample(self, original: Callable[..., Tensor], logits: Tensor, temperatures: Tensor) -> Tensor:
        """The last launches of a step; its tokens are read next."""
        runner = self._engine.model_runner
        with self._reports.range("sample", 0, self._bridge.step):
            ids = original(logits, temperatures)
            context = import_module("nanovllm.utils.context").get_context()
            if not (context.is_prefill or runner.enforce_eager):
                self.model.replayed = next(size for size in runner.graph_bs if size >= len(ids))
            ids = self.model.sampled(logits, ids)
        self._reports.launched(self._bridge.step)
        return ids

    def _settle(self, original: Callable[..., Any], seqs: Sequence[Any], *given: Any) -> None:
        step = self._bridge.step
        with self._reports.range("settle", len(seqs), step):
            original(seqs, *given)
            for seq in seqs:
                self._reports.advance(self._ids[seq.seq_id], seq.completion_token_ids)
        ended = [seq for seq in seqs if seq.is_finished]
        for seq in ended:
            self._reports.finish(self._ids.pop(seq.seq_id))
        self._reports.settled(step, bool(ended))

    def _preempt(self, original: Callable[..., Any], seq: Any) -> None:
        self._reports.retracted(self._ids[seq.seq_id])
        original(seq)

    def _release(self, original: Callable[..., Any], seq: Any) -> None:
        if seq.is_finished:
            name = self._ids[seq.seq_id]
            self._reports.advance(name, seq.completion_token_ids)
            self._ending(name, seq.block_table)
        original(seq)


class NanoVllmModel(PagedModel):
    """In the place of nano-vllm's model."""

    def __call__(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        context = import_module("nanovllm.utils.context").get_context()
        prompts, config = context.is_prefill, self.made.config
        ends = context.cu_seqlens_k if prompts else context.context_lens
        width = context.max_seqlen_k if prompts else context.block_tables.shape[1] * config.page_size
        longest = context.max_seqlen_q if prompts else 1
        places = (context.slot_mapping, context.cu_seqlens_q, ends, context.block_tables)
        return self.hidden(input_ids, positions, *places, width, longest)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """The logits [b, vocab] of each request's last token, selected as ``ParallelLMHead`` does."""
        context = import_module("nanovllm.utils.context").get_context()
        if context.is_prefill:
            hidden = hidden[context.cu_seqlens_q[1:] - 1].contiguous()
        return self.logits(hidden)


def _sampling(given: SamplingParams) -> Any:
    require_sampling(given, "nano-vllm samples by temperature only (Sampler.forward)")
    return import_module("nanovllm.sampling_params").SamplingParams(
        temperature=given.temperature or _GREEDY,
        max_tokens=given.max_new_tokens,
        ignore_eos=given.ignore_eos,
    )


ADAPTER = NanoVllmAdapter()
