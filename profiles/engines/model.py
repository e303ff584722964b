"""The model of an engine's run: schedbench's decoder on the engine's page table.

With values real it computes the scenario's model, so that greedy tokens are those of schedbench's own scheduler. With
values none it makes the same launches, and tokens follow from tags in the KV slots (``sched.model.tags``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch

from ...sched.config import SamplingParams
from ...sched.disagg.kv import KVPort
from ...sched.kernels.sampling import sample_greedy_tagged
from ...sched.memory.pools import KVPool
from ...sched.model.config import ModelConfig
from ...sched.model.decoder import Decoder, Model
from ...sched.model.draft import EagleDraft
from ...sched.model.sparse import KVLocator
from ...sched.model.tags import TaggedDecoder, TagPool
from ...sched.pipeline import StageDecoder
from ..run.compose import engine_config
from ..run.compose_model import draft_weights, index_pool, kv_pool, model_weights, sparse_attention
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


class EngineModel:
    """Weights, and KV whose slots are numbered as the engine numbers them, unless the engine has ``placed`` it
    elsewhere. ``tags`` with values none only."""

    def __init__(self, parts: SystemParts, placed: PlacedKV | None = None) -> None:
        self._resolved = resolved = parts.resolved
        self.config = config = engine_config(resolved, parts.machine)
        self.tags: TagPool | None = None
        self._stage, layers = parts.context.stage, parts.context.layers(resolved.model)
        self._weights = model_weights(resolved, config.device, parts.context)
        self._locator = None if placed is None else placed.locator
        self._kv: KVPool = (
            kv_pool(replace(resolved.model, num_layers=len(layers)), config) if placed is None else placed
        )
        self._index = index_pool(resolved, config)
        self.hidden = resolved.model.hidden_size, resolved.model.dtype
        if resolved.scenario.device.values == "none" and config.speculative is None:
            slots = config.kv_tokens + config.page_size
            self.tags = TagPool(slots=slots, context_len=config.context_len, device=config.device)

    def decoder(self, pages: torch.Tensor) -> Model:
        """The decoder that finds KV slots in the table ``pages``, [rows, context] int32. Launches nothing."""
        decoder = self.bare_decoder(pages)
        return self.tagged(decoder if self._stage is None else StageDecoder(decoder, self._stage), pages)

    def port(self) -> KVPort:
        """Reads and writes KV in the slots, and with values none the tags that stand for it."""
        index = [] if self._index is None else [self._index.k_cache]
        return KVPort(self.tags, self._kv.caches, *index)

    def bare_decoder(self, pages: torch.Tensor) -> Decoder:
        """The decoder without tags."""
        resolved, weights, kv = self._resolved, self._weights, self._kv
        sparse = sparse_attention(resolved, index=self._index, pages=pages, locator=self._locator)
        return Decoder(resolved.model, weights, kv=kv, req_to_token=pages, sparse=sparse)

    def tagged(self, model: Model, pages: torch.Tensor) -> Model:
        """With values none, a model that makes the launches of ``model`` and fingerprints from tags."""
        return model if self.tags is None else TaggedDecoder(model, pool=self.tags, req_to_token=pages)

    def draft(self, pages: torch.Tensor) -> EagleDraft:
        """The draft model of a scenario that speculates; its KV is in the same slots of a pool of its own."""
        draft = self._resolved.draft
        assert draft is not None
        weights = draft_weights(self._resolved, draft, self._weights)
        return EagleDraft(draft, weights, kv=kv_pool(draft, self.config), req_to_token=pages)

    def move_kv(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy the keys and values of the slots ``source`` [n] to the slots ``target`` [n], by one kernel."""
        run_as_one_kernel("move_kv_cache", _moved, self._kv.caches, target, source)


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


PENALTIES: Final = ("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens")
_SAMPLED: Final = ("max_new_tokens", "temperature", "ignore_eos")  # by every engine


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
