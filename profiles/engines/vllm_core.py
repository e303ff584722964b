"""vLLM's engine core with one process, one worker and schedbench's model, and a request's sampling in its terms."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from types import MethodType
from typing import Any, Final

import torch
from torch import Tensor

from ...sched.config import EngineConfig, SamplingParams
from ...sched.model.config import ModelConfig
from .model import PENALTIES, model_folder, process_group_of_one, require_sampling, sampled_alike
from .sglang.edge import LocalGroup

_MODEL: Final = "LlamaForCausalLM"
Forward = Callable[[Tensor, Tensor], Tensor]


def open_core(
    model: ModelConfig,
    config: EngineConfig,
    *,
    overlapped: bool,
    forward: Forward,
    logits: Callable[[Tensor], Tensor],
) -> tuple[Any, Any]:
    """vLLM's engine core and its model runner. ``forward`` makes the hidden states [T, hidden] of token ids [T] at
    positions [T], and ``logits`` the logits [b, vocab] of hidden states [b, hidden]."""
    parallel: Any = import_module("vllm.distributed.parallel_state")
    one: Any = LocalGroup(process_group_of_one(), set())
    one.graph_capture = MethodType(parallel.GroupCoordinator.graph_capture, one)
    for name in ("_WORLD", "_INNER_DP_WORLD", "_TP", "_DCP", "_PCP", "_PP", "_DP", "_EP"):
        setattr(parallel, name, one)
    utilities: Any = import_module("vllm.utils.torch_utils")
    utilities._current_stream_tls = _CurrentStream()
    paged = _paged_module(model, forward, logits)
    import_module("vllm.model_executor.models").ModelRegistry.register_model(_MODEL, paged)
    core = import_module("vllm.v1.engine.core").EngineCore
    given = _vllm_config(model, config, overlapped=overlapped)
    with import_module("vllm.config").set_current_vllm_config(given):
        opened = core(given, _executor(config.device, paged), log_stats=False)
    return opened, opened.model_executor.driver_worker.runner


def _vllm_config(model: ModelConfig, config: EngineConfig, *, overlapped: bool) -> Any:
    chunk = config.chunked_prefill_size
    graphs = "FULL_DECODE_ONLY" if config.cuda_graph else "NONE"
    blocks = config.kv_tokens // config.page_size + 1  # the first is never used
    with tempfile.TemporaryDirectory(prefix="schedbench-model-") as folder:
        arguments = import_module("vllm.engine.arg_utils").EngineArgs(
            model=str(model_folder(model, Path(folder))),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=min(config.context_len, config.kv_tokens),  # one such request has to fit
            block_size=config.page_size,
            num_gpu_blocks_override=blocks,
            enable_prefix_caching=config.radix_cache,
            max_num_seqs=config.max_running_requests,
            max_num_batched_tokens=config.max_prefill_tokens if chunk is None else chunk,
            async_scheduling=overlapped,
            disable_log_stats=True,
            attention_backend="TRITON_ATTN",
            compilation_config={"mode": 0, "cudagraph_mode": graphs},
        )
        return arguments.create_engine_config()


def _executor(device: torch.device, paged: Any) -> Any:
    """vLLM's executor of one process, with a worker of ours that has vLLM's own model runner."""
    workers: Any = import_module("vllm.v1.worker.worker_base")

    class VirtualWorker(workers.WorkerBase):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            import_module("vllm.v1.worker.workspace").init_workspace_manager(device)
            self.runner = import_module("vllm.v1.worker.gpu.model_runner").GPUModelRunner(config, device)
            self.runner.load_model(model=paged(vllm_config=config))
            super().__init__(config, 0, 0, "", is_driver_worker=True)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.runner, name)

        def determine_available_memory(self) -> int:
            """Bytes; the number of blocks is given, so that nothing depends on them."""
            return int(torch.cuda.mem_get_info()[0])

        def initialize_from_config(self, configs: Sequence[Any]) -> None:
            self.runner.initialize_kv_cache(configs[0])

        def compile_or_warm_up_model(self) -> Any:
            self.runner.capture_model()
            return workers.CompilationTimes(0.0, 0.0)

    for name in ("execute_model", "sample_tokens", "get_kv_cache_spec"):
        setattr(VirtualWorker, name, property(attrgetter(f"runner.{name}")))

    class VirtualExecutor(import_module("vllm.v1.executor.uniproc_executor").UniProcExecutor):  # type: ignore[misc]
        def _init_executor(self) -> None:
            self.driver_worker = VirtualWorker(self.vllm_config)

    return VirtualExecutor


def _paged_module(model: ModelConfig, forward: Forward, logits: Callable[[Tensor], Tensor]) -> Any:
    """A class that vLLM's registry takes for a model that generates text, with an attention layer of vLLM's for each
    layer. vLLM does not call the methods of these layers."""
    attention = import_module("vllm.model_executor.layers.attention").Attention
    backend = import_module("vllm.v1.attention.backends.triton_attn").TritonAttentionBackend

    class PagedModule(torch.nn.Module):
        def __init__(self, *, vllm_config: Any, prefix: str = "model") -> None:
            super().__init__()
            for layer in range(model.num_layers):
                attention(
                    model.num_heads,
                    model.head_dim,
                    model.head_dim**-0.5,
                    model.num_kv_heads,
                    cache_config=vllm_config.cache_config,
                    prefix=f"{prefix}.layers.{layer}.self_attn.attn",
                    attn_backend=backend,
                )

        def embed_input_ids(self, input_ids: Tensor) -> Tensor:
            """The registry asks for it; ``forward`` embeds the ids itself."""
            return input_ids

        def forward(self, input_ids: Tensor, positions: Tensor, **_: Any) -> Tensor:
            return forward(input_ids, positions)

        def compute_logits(self, hidden_states: Tensor) -> Tensor:
            return logits(hidden_states)

    return PagedModule


class _CurrentStream:
    """In the place of vLLM's copy of the current stream, which follows calls of ``torch.cuda.set_stream`` only."""

    @property
    def value(self) -> Any:
        return torch.cuda.current_stream()


def vllm_sampling(given: SamplingParams, ends: Sequence[int]) -> Any:
    why = (
        "vLLM's log probabilities are not read, and its Triton kernel of top_k and top_p (apply_top_k_top_p_triton)"
        " cannot be interpreted"
    )
    require_sampling(given, why, "min_p", *PENALTIES, "min_new_tokens", "stop_token_ids")
    made = import_module("vllm.sampling_params").SamplingParams(
        **sampled_alike(given),
        top_k=given.top_k,
        min_tokens=given.min_new_tokens,
        max_tokens=given.max_new_tokens,
        stop_token_ids=list(given.stop_token_ids),
        detokenize=False,
    )
    eos = tuple(ends)
    made.update_from_generation_config({"eos_token_id": list(eos)} if eos else {}, eos[0] if eos else None)
    return made
