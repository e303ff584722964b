"""SGLang's own ``ModelRunner`` with schedbench's decoder as its model: only the loader of weights is replaced.

Pools, attention backends and their metadata, the copies into the inputs of graphs, and the capture and replay of these
graphs are SGLang's.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from ....sched.batch import ForwardBatch
from ...run.system import SystemParts
from ...vgpu.fused import run_as_one_kernel
from ..bridge import RunBridge
from ..model import EngineModel, tagged_ids
from .edge import replace_attribute
from .forward_batch import decoder_batch

PROXIES = ("hidden_states", "residual")  # what a stage of a pipeline sends to the next one
# Functions that make process groups, which are there already, and the modules that call them, from old to new.
_GROUPS = ("init_distributed_environment", "initialize_model_parallel", "initialize_dp_attention")
_GROUP_CALLERS = ("sglang.srt.model_executor.model_runner", "sglang.srt.distributed.bootstrap")
# The method that makes the attention backends when the pools are there, from old to new.
_ATTENTION = ("init_attention_backend", "init_attention_backends")


class DecoderModule(torch.nn.Module):
    """Schedbench's decoder as a model of SGLang, which finds KV by the metadata of SGLang's attention backend. With
    values none, hidden states are the tokens' fingerprints."""

    shared_experts_config = None

    def __init__(self, parts: SystemParts) -> None:
        super().__init__()
        self.made = EngineModel(parts)
        layers = parts.context.layers(parts.resolved.model)
        self.start_layer, self.end_layer = layers.start, layers.stop
        self._sends = parts.context.stage is not None and not parts.context.stage.is_last
        self.runner = (
            SimpleNamespace()
        )  # with SGLang's model runner as ``own``, which is no module of this one

    def forward(
        self,
        input_ids: torch.Tensor,  # noqa: ARG002
        positions: torch.Tensor,  # noqa: ARG002
        forward_batch: Any,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        """The logits of the batch, which has the ids and positions, too, or what a stage of a pipeline sends to the
        next one. Lengths in a graph are those of its replay."""
        captured = torch.cuda.is_current_stream_capturing()
        batch = decoder_batch(forward_batch, self.made.config.context_len, captured=captured)
        table, batch.req_pool_indices = self._table(batch)
        if pp_proxy_tensors is not None:
            batch.proxies = tuple(pp_proxy_tensors[name] for name in PROXIES)
        output = self.made.decoder(table).forward(batch)
        if self._sends:
            batches = import_module("sglang.srt.model_executor.forward_batch_info")
            return batches.PPProxyTensors(dict(zip(PROXIES, output.proxies, strict=True)))
        kind = import_module("sglang.srt.layers.logits_processor").LogitsProcessorOutput
        return kind(next_token_logits=output.logits, hidden_states=output.fingerprint)

    def _table(self, batch: ForwardBatch) -> Sequence[torch.Tensor]:
        """A table of KV slots, and the batch's rows in it. The metadata of decodes have all slots, those of other steps
        have the slots of prefixes."""
        if batch.mode.is_idle:
            return self.runner.own.req_to_token_pool.req_to_token, batch.req_pool_indices
        found = self.runner.own.attn_backend.forward_metadata
        known = batch.seq_lens if batch.mode.is_decode else batch.extend_prefix_lens
        begins = found.kv_indptr[: batch.batch_size]
        given = (begins, found.kv_indices, known, batch.extend_lens, batch.out_cache_loc, batch.max_seq_len)
        return run_as_one_kernel("slots of metadata", _slots, *given)  # type: ignore[no-any-return]


def _slots(
    begins: torch.Tensor,
    slots: torch.Tensor,
    known: torch.Tensor,
    new: torch.Tensor | None,
    new_slots: torch.Tensor,
    longest: int,
) -> Sequence[torch.Tensor]:
    """A table [b, longest] int32 of each request's ``known`` slots, which begin at its entry of ``begins`` [b], and its
    ``new_slots`` behind them, ``new`` of them or, with None, one; and the numbers of its rows."""
    new = torch.ones_like(known) if new is None else new
    rows = torch.arange(begins.numel(), device=begins.device)
    places = torch.arange(longest, device=begins.device)
    behind = slots.numel() + torch.cumsum(new, 0) - new - known  # of position 0, were it new
    at = torch.where(places < known.unsqueeze(1), begins.unsqueeze(1), behind.unsqueeze(1)) + places
    every = torch.cat([slots.to(torch.int32), new_slots.to(torch.int32)])
    return every[torch.clamp(at, max=every.numel() - 1)], rows


class OwnRunner:
    """Replaces the loader of weights, and reports the ranges of forwards and of sampling. See ``RunnerStub``."""

    def __init__(self, parts: SystemParts, bridge: RunBridge, reports: RunBridge) -> None:
        self.defaults: set[str] = set()
        self._parts = parts
        self._bridge, self._reports = bridge, reports

    def install(self) -> None:
        kind: Any = import_module("sglang.srt.model_executor.model_runner").ModelRunner
        loader: Any = import_module("sglang.srt.model_loader.loader").DummyModelLoader
        loader.load_model = lambda *_, **__: DecoderModule(self._parts)
        for caller in _GROUP_CALLERS:
            for name in _GROUPS:
                replace_attribute(caller, name, lambda *_, **__: None)
        attention = next(name for name in _ATTENTION if hasattr(kind, name))
        attend, forward, sample = getattr(kind, attention), kind.forward, kind.sample

        def init_attention(runner: Any) -> None:
            runner.engine_model = runner.model.made
            runner.model.runner.own = runner
            attend(runner)

        def ranged(runner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            with self._reports.range("model", batch.batch_size, self._bridge.step):
                return forward(runner, batch, *args, **kwargs)

        def sampled(runner: Any, output: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            fingerprint, output.hidden_states = output.hidden_states, None
            with self._reports.range("sample", batch.batch_size, self._bridge.step):
                ids = sample(runner, output, batch, *args, **kwargs)
                return tagged_ids(ids, output.next_token_logits, fingerprint)

        setattr(kind, attention, init_attention)
        kind.forward, kind.sample = ranged, sampled
