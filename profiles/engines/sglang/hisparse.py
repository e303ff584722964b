"""SGLang's KV on the host: its coordinator, pools and allocators are its own.

A row of SGLang's pool has the keys and then the values of a token in one layer, as many bytes as schedbench's decoder
stores there, which reads and writes them where SGLang's coordinator says that they are.
"""

from __future__ import annotations

import contextlib
import json
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor

from ....scenarios.schema import EngineSection
from ....sched.batch import ForwardBatch
from ....sched.model.config import ModelConfig
from ..model import PlacedKV, long
from ..names import EngineError
from .edge import fitted
from .hisparse_kernels import at_addresses

PAGE: Final = 64  # tokens, to which SGLang sets the page size of a model with DeepSeek's sparse attention
# Modules of a name, from new to old.
_ALLOCATORS: Final = ("mem_cache.allocator.hisparse", "mem_cache.hisparse_memory_pool")
_HOST_POOLS: Final = ("mem_cache.pool_host.common", "mem_cache.memory_pool_host")
_INDEX_HEAD: Final = 128  # the only size of SGLang's own keys of the indexer, which are not used


def arguments(engine: EngineSection, model: ModelConfig) -> dict[str, Any]:
    """SGLang's arguments of KV on the host, none where it is off. Raises EngineError for a ratio or a page size that it
    does not have."""
    if not engine.hisparse.enabled:
        return {}
    if engine.page_size != PAGE:
        raise EngineError(
            f"SGLang's hisparse has pages of {PAGE} tokens (ServerArgs._handle_model_specific_adjustments):"
            f" set engine.page_size={PAGE}"
        )
    wanted = engine.hisparse
    if wanted.host_ratio != int(wanted.host_ratio):
        raise EngineError(
            "SGLang's hisparse needs a whole number as engine.hisparse.host_ratio (parse_hisparse_config)"
        )
    assert model.indexer is not None
    config = {
        "top_k": model.indexer.top_k,
        "device_buffer_size": wanted.buffer_size(model.indexer.top_k),
        "host_to_device_ratio": int(wanted.host_ratio),
    }
    return {"enable_hisparse": True, "hisparse_config": json.dumps(config), "kv_cache_dtype": "bfloat16"}


def sparse_model(model: ModelConfig) -> dict[str, Any]:
    """Keys of the configuration of a model with DeepSeek's sparse attention."""
    assert model.indexer is not None
    return {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        **_latent(model),
        "qk_nope_head_dim": model.head_dim,
        "v_head_dim": model.head_dim,
        "index_topk": model.indexer.top_k,
        "index_head_dim": _INDEX_HEAD,
        "index_n_heads": model.indexer.heads,
    }


def _row_size(model: ModelConfig) -> int:
    """The number of elements of a token's keys and values in one layer."""
    return 2 * model.num_kv_heads * model.head_dim


def _latent(model: ModelConfig) -> dict[str, int]:
    """The two parts of a row of SGLang's pool, which nothing here tells apart."""
    rotary = model.head_dim
    return {"kv_lora_rank": _row_size(model) - rotary, "qk_rope_head_dim": rotary}


class HostedKV:
    """SGLang's own coordinator with its pools, and the ``KVLocator`` of the decoder's KV in them. Raises EngineError
    where a release lacks one of them."""

    def __init__(self, req_to_token_pool: Any, args: Any, model: ModelConfig, group: Any) -> None:
        self._model = model
        config = json.loads(args.hisparse_config)
        common = {
            "size": args.max_total_tokens,
            "page_size": args.page_size,
            "dtype": model.dtype,
            "device": "cuda",
            "host_to_device_ratio": config["host_to_device_ratio"],
        }
        self.pool = fitted(
            _required("HiSparseDSATokenToKVPool", "mem_cache.hisparse_memory_pool"),
            **common,
            **_latent(model),
            kv_cache_dim=_row_size(model),
            layer_num=model.num_layers,
            index_head_dim=_INDEX_HEAD,
            enable_memory_saver=False,
            start_layer=0,
            end_layer=model.num_layers,
        )
        self.allocator = fitted(
            _required("HiSparseTokenToKVPoolAllocator", *_ALLOCATORS),
            **common,
            kvcache=self.pool,
            need_sort=False,
        )
        self.mapping: Tensor = self.allocator.full_to_hisparse_device_index_mapping
        self.pool.register_mapping(self.mapping)  # itself, since no kernel takes a weak reference
        with_pinned_memory()
        self.coordinator = fitted(
            _required("HiSparseCoordinator", "managers.hisparse_coordinator"),
            req_to_token_pool=req_to_token_pool,
            token_to_kv_pool_allocator=self.allocator,
            top_k=config["top_k"],
            device_buffer_size=config["device_buffer_size"],
            device="cuda",
            tp_group=group,
            host_to_device_ratio=config["host_to_device_ratio"],
        )
        pinned = self.coordinator.mem_pool_host
        at_addresses(pinned.data_ptrs, pinned.kv_buffer)
        at_addresses(self.pool.data_ptrs, self.pool.kv_buffer)
        torch.cuda.synchronize()  # as SGLang does before it captures graphs, on another stream

    def placed(self) -> PlacedKV:
        """The decoder's KV in SGLang's pool."""
        shape = (-1, 2, self._model.num_kv_heads, self._model.head_dim)
        pairs = [layer.view(shape).unbind(1) for layer in self.pool.kv_buffer]
        keys, values = zip(*pairs, strict=True)
        return PlacedKV(keys, values, self.pool.page_size, self)

    def write_slots(self, batch: ForwardBatch) -> Tensor:
        return long(self.pool.translate_loc_to_hisparse_device(batch.out_cache_loc))

    def read_slots(self, layer: int, positions: Tensor, batch: ForwardBatch) -> Tensor:
        swap_in = self.coordinator.swap_in_selected_pages
        slots: Tensor = swap_in(batch.req_pool_indices, batch.seq_lens, positions, layer)
        return slots

    def before_forward(self, batch: Any) -> None:
        """As SGLang's model runner does it in front of the forward of a decode."""
        if batch.forward_mode.is_decode():
            self.coordinator.wait_for_pending_backup()
            self.coordinator.num_real_reqs.fill_(batch.batch_size)


def _required(name: str, *modules: str) -> Any:
    """What has that name in the first of SGLang's modules that has it."""
    for module in modules:
        with contextlib.suppress(ImportError, AttributeError):
            return getattr(import_module(f"sglang.srt.{module}"), name)
    raise EngineError(f"hisparse needs {name}, which this SGLang does not have")


def with_pinned_memory() -> None:
    """Let SGLang allocate the host's pool as pinned memory, by a function of its own, rather than register memory."""
    allocate = _required("alloc_with_pin_memory", *_HOST_POOLS)
    _required("ALLOC_MEMORY_FUNCS", *_HOST_POOLS)["cuda"] = allocate
