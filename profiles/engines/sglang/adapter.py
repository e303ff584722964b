"""The adapter of SGLang: what it needs, and which scenarios it can run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Final

from ....scenarios.combinations import MODES
from ....scenarios.schema import Scenario
from ...run.system import System, SystemParts
from ..adapter import needed
from ..names import ADAPTERS

# Packages with compiled kernels, servers and clients: none of them takes part in a scheduler's step of a dense model.
_HOLLOW: Final = (
    "addict anthropic apache_tvm_ffi av build cachetools compressed_tensors cuda cutlass datasets decord"
    " decord2 deep_gemm diskcache distro easydict flash_mla flashinfer gguf grpc hf_transfer imageio"
    " interegular modelscope mooncake msgpack ninja nixl nvidia_ml_py openai openai_harmony outlines"
    " outlines_core pydantic_settings pynvml quack sgl_deep_gemm sgl_kernel sgl_kernel_npu smg_grpc_proto"
    " smg_grpc_servicer soundfile termcolor tilelang timm tokenspeed_mla torch_memory_saver torchao"
    " torchaudio torchcodec torchvision tvm_ffi uvloop watchfiles xgrammar"
)
_REQUIRES: Final = (
    "aiohttp dill einops fastapi IPython msgspec orjson partial_json_parser PIL prometheus_client psutil"
    " pybase64 sentencepiece setproctitle tiktoken transformers uvicorn zmq"
)
# What of SGLang stands in the way of each mode.
_REFUSED: Final = {
    "shared MLP": "layers that several ranks compute (dp_gather_partial)",
    "replicas": "a router, which is a program of its own (launch_router)",
    "split prefill": "streams with a share of the GPU each (initialize_stream_groups)",
    "hidden states": "the states of its model, which is a stub (LogitsProcessorOutput)",
    "controls": "messages that this version does not send (Scheduler.pause_generation)",
    "deferred": "Apple's MLX (SchedulerMlxOverlapMixin.event_loop_overlap_mlx)",
    "embedding": "a pooled model (TpModelWorker.forward_batch_embedding)",
    "encoder-decoder": "a model with an encoder, and images (ScheduleBatch.prepare_encoder_info_extend)",
    "block diffusion": "a model of its own (DllmAlgorithm.run)",
}
# The same where SGLang's own model runner is asked for.
_REFUSED_OWN: Final = {
    "speculation": "a draft of SGLang's own, which takes layers of the target (get_embed_and_head)",
    "hisparse": "CUDA kernels of its sparse attention (DeepseekSparseAttnBackend)",
    "prompt logprobs": "hidden states in the place of logits (LogitsProcessor.forward)",
}
# The same with KV on the host.
_REFUSED_HOSTED: Final = {
    "values none": "tags in the host's pool, which SGLang has not (MLATokenToKVPoolHost)",
    "disaggregation": "KV that lands on the host, beside buffers that begin empty"
    " (HiSparseCoordinator.admit_request_direct)",
    "prompt logprobs": "hidden states in the place of logits (LogitsProcessor.forward)",
}
_NO_IDS: Final = "values: what stages send has no place for the ids by which KV is tagged (PPProxyTensors)"
_HIDDEN: Final = "those that the wait for the stub's whole forward hides ({}, overlapped)"
_PIP_NAMES: Final = {
    "zmq": "pyzmq",
    "partial_json_parser": "partial-json-parser",
    "transformers": "transformers==5.8.1",
    "IPython": "ipython",
    "PIL": "pillow",
}


class SglangAdapter:
    """Fits SGLang from 0.5.4 on. See ``EngineAdapter``."""

    package, python_path = ADAPTERS["sglang"]
    stages = transfers = data_ranks = own_runner = True
    stub_runner = {  # noqa: RUF012
        "speculation": _HIDDEN.format("SGLang 0.5.14 to 0.5.21"),
        "hisparse": _HIDDEN.format("SGLang 0.5.14 and later"),
    }
    environment = {  # noqa: RUF012
        "SGLANG_DISABLE_TORCHAO": "1",
        "SGLANG_FORCE_CONFIDENTIAL_COMPUTE": "0",  # otherwise NVML is asked
        "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",  # the Rust tree makes its tensors inside libtorch
        "TRITON_INTERPRET": "1",
    }
    hollow = tuple(_HOLLOW.split())
    requires = {name: _PIP_NAMES.get(name, name) for name in _REQUIRES.split()}  # noqa: RUF012

    def load(self) -> None:
        from .edge import prepared_modules

        prepared_modules()
        for name in ("scheduler", "schedule_batch", "io_struct", "tp_worker"):
            import_module(f"sglang.srt.managers.{name}")
        import_module("sglang.srt.models.registry")  # which imports all models: otherwise each run would

    def needs(self, scenario: Scenario) -> Sequence[str]:
        return list(_refusals(scenario))

    def open(self, parts: SystemParts) -> System:
        from .system import SglangSystem

        return SglangSystem(parts)


def _refusals(scenario: Scenario) -> Iterator[str]:
    yield from needed(scenario, _REFUSED)
    pair = scenario.engine.disaggregation
    if pair.mode == "pair" and pair.transfer == "nixl":
        yield "disaggregation by nixl needs memory of a device (register_buffer_to_engine); use {transfer: local}"
    if pair.mode == "pair" and pair.transfer != "fake" and MODES["speculation"].on(scenario):
        yield "speculation in a pair needs the KV of SGLang's own draft (DecodePreallocQueue._init_kv_manager)"
    if MODES["own model runner"].on(scenario):
        yield from needed(scenario, _REFUSED_OWN, mode="{} with engine.model_runner=own")
        if MODES["pipeline"].on(scenario) and MODES["values none"].on(scenario):
            yield f"a pipeline with engine.model_runner=own needs {_NO_IDS}"
    if MODES["hisparse"].on(scenario):
        yield from needed(scenario, _REFUSED_HOSTED, mode="hisparse with {}")
    if MODES["speculation"].on(scenario):
        acceptance = scenario.engine.speculative.acceptance
        if acceptance != "measured" and acceptance.per == "request":
            yield (
                "simulated acceptance needs {per: batch}: SGLang draws once for a batch"
                " (generate_simulated_accept_index)"
            )


ADAPTER = SglangAdapter()
