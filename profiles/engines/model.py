"""The model of an engine's run: schedbench's decoder on the engine's page table.

With values real it computes the scenario's model, so that greedy tokens are those of schedbench's own scheduler. With
values none it makes the same launches, and tokens follow from tags in the KV slots (``sched.model.tags``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch

from ...sched.config import SamplingParams
from ...sched.kernels.sampling import sample_greedy_tagged
from ...sched.memory.pools import KVPool
from ...sched.model.config import ModelConfig
from ...sched.model.sparse import KVLocator
from ..run.compose import engine_config
from ..run.compose_model import RankModel
from ..run.system import SystemParts
from ..vgpu.fused import run_as_one_kernel
from .names import EngineError


class PlacedKV(KVPool):
    """KV in the engine's own tensors, which are caches of [slots, kv_heads, head_dim] for each layer, in the slots that
    the ``locator`` names."""

    def __init__(
        self,
        k_cache: Sequence[torch.Tensor],
        v_cache: Sequence[torch.Tensor],
        page_size: int,
        locator: KVLocator,
    ) -> None:
        self.k_cache, self.v_cache = list(k_cache), list(v_cache)
        self.page_size, self.tokens = page_size, len(k_cache[0]) - page_size
        self.locator = locator


class EngineModel(RankModel):
    """KV slots are numbered as the engine numbers them, unless the engine has ``placed`` KV elsewhere."""

    def __init__(self, parts: SystemParts, placed: PlacedKV | None = None) -> None:
        resolved = parts.resolved
        config, locator = engine_config(resolved, parts.machine), None if placed is None else placed.locator
        super().__init__(resolved, config, parts.context, kv=placed, locator=locator)
        self.hidden = resolved.model.hidden_size, resolved.model.dtype

    def move_kv(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy the keys and values of the slots ``source`` [n] to the slots ``target`` [n], by one kernel."""
        run_as_one_kernel("move_kv_cache", _moved, self.kv.caches, target, source)


def _moved(caches: Sequence[torch.Tensor], target: torch.Tensor, source: torch.Tensor) -> None:
    for cache in caches:
        cache[target.to(torch.int64)] = cache[source.to(torch.int64)]


def tagged_ids(ids: torch.Tensor, logits: torch.Tensor, fingerprint: torch.Tensor | None) -> torch.Tensor:
    """The sampled ids [b]; with values none, those that follow from the KV tags."""
    return ids if fingerprint is None else sample_greedy_tagged(logits, None, fingerprint).to(ids.dtype)


def long(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as int64; one launch where it is not."""
    return tensor if tensor.dtype == torch.int64 else tensor.to(torch.int64)


def tokenizer(model: ModelConfig) -> SimpleNamespace:
    """What finish checks and penalties of engines ask of a tokenizer, which nothing else uses."""
    return SimpleNamespace(eos_token_id=next(iter(model.eos_token_ids), -1), additional_stop_token_ids=None)


PENALTIES: Final = ("frequency_penalty", "presence_penalty", "repetition_penalty")
_SAMPLED: Final = ("max_new_tokens", "temperature", "ignore_eos")  # by every engine


def sampled_alike(given: SamplingParams) -> dict[str, Any]:
    """The parameters that SGLang and vLLM call the same."""
    names = ("temperature", "top_p", "min_p", "ignore_eos", *PENALTIES)
    return {name: getattr(given, name) for name in names}


def require_sampling(given: SamplingParams, why: str, *sampled: str) -> None:
    """Raises EngineError, which says ``why``, where a request asks for more than an engine has ``sampled`` by."""
    if more := [
        field.name
        for field in fields(given)
        if field.name not in (*_SAMPLED, *sampled) and getattr(given, field.name) != field.default
    ]:
        raise EngineError(f"{why}: workload.sampling asks for {', '.join(more)}")


def model_folder(model: ModelConfig, folder: Path, **more: Any) -> Path:
    """Write a Llama configuration of the model's shape, from which engines read sizes, or that of another model with
    ``more`` keys. There are no weights."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "num_hidden_layers": model.num_layers,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_positions,
        "eos_token_id": list(model.eos_token_ids) or None,
        "rms_norm_eps": model.rms_norm_eps,
        "torch_dtype": "bfloat16",
        **more,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    # Transformers warns where there is none.
    (folder / "generation_config.json").write_text("{}", encoding="utf-8")
    return folder


def process_group_of_one() -> Any:
    """A process group of torch.distributed with this process alone, without a port. What is reduced in it is left as it
    is, and nothing is launched, as NCCL does it."""
    distributed: Any = torch.distributed
    with torch._C.DisableTorchFunction():
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    distributed.all_reduce = lambda *_, **__: None
    return distributed.group.WORLD


def another_group_of_one() -> Any:
    """A further one, beside that of ``process_group_of_one``."""
    distributed: Any = torch.distributed
    with torch._C.DisableTorchFunction():
        return distributed.new_group([0])
