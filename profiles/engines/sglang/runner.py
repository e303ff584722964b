"""SGLang's ``ModelRunner`` with schedbench's decoder instead of a model: pools, sampler and all else are SGLang's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from ....scenarios.combinations import MODES
from ....sched.batch import ForwardBatch, ForwardMode, ModelOutput
from ....sched.kernels.rows import embedding
from ...platform.resolve import speculative_config
from ...run.system import SystemParts
from ..bridge import RunBridge
from ..model import EngineModel, tagged_ids
from .eagle import AttentionStub, EagleForwards, prepare_worker, simulate, without_weights
from .edge import fitted
from .forward_batch import decoder_batch
from .graphs import GraphRunner
from .hisparse import HostedKV

# Steps of the runner's preparation that load weights or make what the decoder replaces.
_LEFT_OUT = (
    *("alloc_memory_pool", "init_attention_backends", "init_cuda_graphs"),
    *("get_pp_proxy_topk_size", "get_pp_proxy_residual_num_blocks"),
)
# What a draft's runner has of its target's.
_SHARED = (
    *("req_to_token_pool", "token_to_kv_pool", "token_to_kv_pool_allocator", "sampler", "attn_backend"),
    *(
        "max_total_num_tokens",
        "max_running_requests",
        "full_max_total_num_tokens",
        "swa_max_total_num_tokens",
    ),
)
# What a stage of a pipeline sends to the next one; the ids where KV has tags.
_PROXIES = ("hidden_states", "residual", "input_ids")
# Components that later versions make in steps of their own, and that scheduling asks for.
_MADE = ("init_spec_aux_hidden_state", "init_ngram_embedding_manager", "init_kv_index_translator")


class RunnerStub:
    """Replaces the constructor and the forward of SGLang's ``ModelRunner``. ``defaults`` are the names of attributes
    that only a model would have set, and that were answered by a constant. ``reports`` has the bridge's methods, which
    take no host time."""

    def __init__(self, parts: SystemParts, bridge: RunBridge, reports: RunBridge) -> None:
        self.defaults: set[str] = set()
        self._parts = parts
        self._bridge, self._reports = bridge, reports
        self._module: Any = import_module("sglang.srt.model_executor.model_runner")
        self._target: Any = None  # the runner that is not a draft's
        self._eagle: EagleForwards | None = None
        self._hosted: HostedKV | None = None  # where KV is on the host
        # Where SGLang's scheduler takes the event for which it waits instead of the whole forward, from 0.5.14 on.
        made = self._module.ModelRunner.__init__.__code__.co_names
        self._mailbox = next((name for name in made if name.endswith("read_done_event")), "")

    def install(self) -> None:
        kind = self._module.ModelRunner
        signature, sample = inspect.signature(kind.__init__), kind.sample
        for name in _LEFT_OUT:
            if hasattr(kind, name):
                setattr(kind, name, lambda *_, **__: None)

        def init(runner: Any, *args: Any, **kwargs: Any) -> None:
            self._init(runner, signature.bind(runner, *args, **kwargs).arguments)

        def absent(runner: Any, name: str) -> Any:
            return self._default(runner, name)

        def forward(runner: Any, forward_batch: Any, *_: Any, pp_proxy_tensors: Any = None, **__: Any) -> Any:
            return self._forward(runner, forward_batch, pp_proxy_tensors)

        def sampled(runner: Any, output: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            with self._reports.range("sample", forward_batch.batch_size, self._bridge.step):
                ids = sample(runner, output, forward_batch, *args, **kwargs)
                made: ModelOutput = runner.output
                return tagged_ids(ids, made.logits, made.fingerprint)

        kind.__init__, kind.__getattr__, kind.forward, kind.sample = init, absent, forward, sampled

    def _init(self, runner: Any, given: dict[str, Any]) -> None:
        args = given["server_args"]
        runner.server_args, runner.model_config = args, given["model_config"]
        runner.device, runner.gpu_id, runner.page_size = "cuda", 0, args.page_size
        runner.tp_rank = runner.moe_ep_rank = 0
        runner.tp_size = runner.dp_size = 1
        runner.pp_group = group = import_module("sglang.srt.distributed.parallel_state")._PP
        runner.pp_rank, runner.pp_size = group.rank_in_group, group.world_size
        runner.is_draft_worker, runner.is_generation = given.get("is_draft_worker", False), True
        runner.forward_pass_id = 0
        if self._mailbox:
            setattr(runner, self._mailbox, None)
        if "ps" in given:
            runner.ps = given["ps"]
        runner.forward_stream = torch.cuda.Stream()
        runner.sliding_window_size = runner.is_hybrid_swa = None
        runner.weight_load_mem_usage = runner.graph_mem_usage = 0.0
        runner.model = SimpleNamespace()
        without_weights(runner.model)
        algorithms = import_module("sglang.srt.speculative.spec_info").SpeculativeAlgorithm
        runner.spec_algorithm = algorithms.from_string(args.speculative_algorithm)
        if runner.is_draft_worker:
            vars(runner).update({name: vars(self._target)[name] for name in _SHARED})
            runner.model.forward = lambda *given: self._logits(runner, given[-1])
        else:
            self._target = runner
            self._pools(runner, args)
            self._model(runner)
        for name in _MADE:
            if hasattr(type(runner), name):
                getattr(runner, name)()

    def _model(self, runner: Any) -> None:
        sampler = import_module("sglang.srt.layers.sampler")
        make: Any = getattr(sampler, "create_sampler", None) or sampler.Sampler
        runner.sampler = make()
        runner.attn_backend = SimpleNamespace(needs_cpu_seq_lens=True)
        pages = runner.req_to_token_pool.req_to_token
        with torch.cuda.stream(runner.forward_stream):
            placed = None if self._hosted is None else self._hosted.placed()
            runner.engine_model = model = EngineModel(self._parts, placed)
            config = model.config
            if not runner.spec_algorithm.is_none():
                runner.attn_backend = AttentionStub(runner.model_config.context_len)
                assert config.speculative is not None
                overlaps = not runner.server_args.disable_overlap_schedule
                prepare_worker(runner.attn_backend, config.speculative, overlaps=overlaps)
                runner.token_to_kv_pool.move_kv_cache = model.move_kv
                if config.speculative.acceptance is not None:
                    simulate(config.speculative.acceptance)
                self._eagle = EagleForwards(model, model.decoder(pages), pages)
                config = replace(config, cuda_graph=False)  # no step is a decode
            proxies = self._parts.context.proxies(self._parts.resolved.model, model.tags)
            runner.decoder = GraphRunner(model, pages, config, proxies, lambda: self._publish_read(runner))

    def _publish_read(self, runner: Any) -> None:
        """A graph that is about to be replayed reads nothing more that the scheduler changes, unless it finds KV in the
        tables of the coordinator."""
        if self._mailbox and self._hosted is None:
            event = torch.cuda.Event()
            event.record()
            setattr(runner, self._mailbox, event)

    def _pools(self, runner: Any, args: Any) -> None:
        """SGLang's own pools; the decoder's KV lies in a pool of its own, under the same slot numbers."""
        pools = import_module("sglang.srt.mem_cache.memory_pool")
        allocators = import_module("sglang.srt.mem_cache.allocator")
        tokens, page_size = args.max_total_tokens, args.page_size
        runner.max_total_num_tokens = tokens
        if not isinstance(getattr(type(runner), "max_token_pool_size", None), property):
            runner.max_token_pool_size = tokens
        runner.max_running_requests = args.max_running_requests
        runner.full_max_total_num_tokens = runner.swa_max_total_num_tokens = tokens
        common = {"device": "cuda", "dtype": torch.bfloat16, "page_size": page_size}
        decodes = args.disaggregation_mode == "decode"
        runner.req_to_token_pool = fitted(
            import_module("sglang.srt.disaggregation.decode").DecodeReqToTokenPool
            if decodes
            else pools.ReqToTokenPool,
            size=args.max_running_requests,
            pre_alloc_size=2
            * args.max_running_requests,  # of a decode worker, as SGLang has it up to 32 requests
            max_context_len=runner.model_config.context_len + 4 + self._overhang(),
            device="cuda",
            enable_memory_saver=False,
        )
        if MODES["hisparse"].on(self._parts.resolved.scenario):
            self._host(runner, args)
            return
        runner.token_to_kv_pool = fitted(
            pools.MHATokenToKVPool,
            **common,
            size=tokens,
            head_num=1,
            head_dim=8,
            layer_num=1,
            enable_memory_saver=False,
            start_layer=0,
            end_layer=1,
        )
        paged = page_size > 1
        runner.token_to_kv_pool_allocator = fitted(
            allocators.PagedTokenToKVPoolAllocator if paged else allocators.TokenToKVPoolAllocator,
            **common,
            size=tokens,
            kvcache=runner.token_to_kv_pool,
            need_sort=False,
        )

    def _host(self, runner: Any, args: Any) -> None:
        """SGLang's pools where KV is on the host."""
        group, model = runner.pp_group.cpu_group, self._parts.resolved.model
        self._hosted = hosted = HostedKV(runner.req_to_token_pool, args, model, group)
        runner.enable_hisparse, runner.hisparse_coordinator = True, hosted.coordinator
        runner.token_to_kv_pool, runner.token_to_kv_pool_allocator = hosted.pool, hosted.allocator

    def _overhang(self) -> int:
        """Positions behind a request's last token that drafts may be written to. In each of the two steps for which
        SGLang reserves KV (``get_alloc_reserve_per_decode``), a branch of a tree begins on a page of its own and ends
        within one, and the row before them ends within a page, too."""
        engine = self._parts.resolved.scenario.engine
        spec = speculative_config(engine.speculative)
        if spec is None:
            return 0
        partial_pages = 0 if spec.topk == 1 else 2 * 2 * spec.topk + 1
        return spec.overhang + partial_pages * (engine.page_size - 1)

    def _default(self, runner: Any, name: str) -> Any:
        """What a model would have set: groups of one rank, sizes of 1, numbers of 0, and None."""
        if name.startswith("__") or name == "_modules":
            raise AttributeError(name)
        self.defaults.add(name)
        if name.endswith("_group"):
            return import_module("sglang.srt.distributed.parallel_state")._WORLD
        if name.endswith("max_total_num_tokens"):
            return runner.max_total_num_tokens
        if name.endswith("_size"):
            return 1
        return 0 if name.endswith(("_rank", "_bytes", "_time")) else None

    def _forward(self, runner: Any, batch: Any, proxies: Any) -> Any:
        runner.forward_pass_id += 1
        batch.schedbench_proxies = (
            ()
            if proxies is None or runner.pp_group.is_first_rank
            else tuple(proxies[name] for name in _PROXIES if name in proxies.tensors)
        )
        logits = self._logits(runner, batch)
        kind: Callable[..., Any] | None = getattr(self._module, "ModelRunnerOutput", None)
        if kind is None:
            return logits, False
        return fitted(kind, logits_output=logits, can_run_graph=False)

    def _logits(self, runner: Any, batch: Any) -> Any:
        processor = import_module("sglang.srt.layers.logits_processor")
        if batch.return_logprob and processor.LogitsMetadata.from_forward_batch(batch).extend_return_logprob:
            return self._scored(runner, batch, processor)
        logits, hidden = self._computed(runner, batch)
        if not runner.is_draft_worker and not runner.pp_group.is_last_rank:
            batches = import_module("sglang.srt.model_executor.forward_batch_info")
            return batches.PPProxyTensors(dict(zip(_PROXIES, runner.output.proxies, strict=False)))
        return processor.LogitsProcessorOutput(next_token_logits=logits, hidden_states=hidden)

    def _scored(self, runner: Any, batch: Any, module: Any) -> Any:
        """The output for prompts whose log probabilities were asked for: SGLang computes them from hidden states."""
        model = runner.engine_model
        decoder = model.bare_decoder(runner.req_to_token_pool.req_to_token)
        made = decoder_batch(batch, model.config.context_len)
        processor = module.LogitsProcessor(runner.model_config.hf_text_config)
        processor._get_logits = lambda states, *_, **__: decoder.logits(states)
        with self._reports.range("model", batch.batch_size, self._bridge.step):
            hidden = decoder.layers(embedding(made.input_ids, decoder.weights.embedding), made)
            output = processor(batch.input_ids, hidden, None, batch)
        runner.output = ModelOutput(output.next_token_logits)
        return output

    def _computed(self, runner: Any, batch: Any) -> Sequence[torch.Tensor | None]:
        """Logits, and hidden states where a draft needs them."""
        target, eagle = self._target, self._eagle
        made = decoder_batch(batch, target.engine_model.config.context_len, draft=runner.is_draft_worker)
        if eagle is not None and runner.is_draft_worker:
            slots = _slots_until_now(batch, made) if made.mode is ForwardMode.DRAFT else ()
            return eagle.draft(made, batch.spec_info.hidden_states, slots)
        if eagle is not None and made.mode is ForwardMode.TARGET_VERIFY:
            return eagle.verify(made, batch.spec_info.custom_mask)
        if self._hosted is not None:
            self._hosted.before_forward(batch)
        with self._reports.range("model", batch.batch_size, self._bridge.step):
            target.output = output = target.decoder.forward(made)
            return output.logits, output.hidden_states


def _slots_until_now(batch: Any, made: ForwardBatch) -> Sequence[torch.Tensor]:
    """The slots of the drafts of each step, with those of this one: SGLang runs one batch for all steps."""
    batch.schedbench_drafts = slots = [*getattr(batch, "schedbench_drafts", ()), made.out_cache_loc]
    return slots
