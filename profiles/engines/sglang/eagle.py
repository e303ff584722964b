"""SGLang's overlapped EAGLE worker with schedbench's draft: what its two model runners compute, and its ranges.

The worker, its kernels, the verdict and the relay are SGLang's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import torch

from ....sched.batch import ForwardBatch, ForwardMode, draft_step, extend_step
from ....sched.config import SimulatedAcceptance
from ....sched.kernels.rows import last_tokens
from ....sched.model.decoder import Model
from ....sched.model.runner import GraphedFunction, GraphInput, graph_sizes
from ..bridge import RunBridge
from ..model import EngineModel
from ..names import EngineError

# Methods of the worker and of its draft worker: the range of each, and its step among those of an iteration.
_VERIFY: Final = {"verify": ("verify", int)}
_DRAFT: Final = {
    "draft": ("draft", draft_step),
    "_draft_extend_for_decode": ("draft_extend", extend_step),
    "_draft_extend_for_prefill": ("draft_extend", extend_step),
}

_SIMULATOR: Final = "generate_simulated_accept_index"


class AttentionStub:
    """Stands for SGLang's attention backends, whose metadata the decoder does not read. It asks of the scheduler what
    the Triton backend does, and is the backend of every step of a draft, too."""

    verify_mask = None

    def __init__(self, context_len: int) -> None:
        module = import_module("sglang.srt.layers.attention.triton_backend")
        self.needs_cpu_seq_lens = getattr(module.TritonAttnBackend, "needs_cpu_seq_lens", True)
        self.max_context_len = context_len

    def __getitem__(self, step: int) -> AttentionStub:
        return self

    @property
    def attn_backends(self) -> AttentionStub:
        return self

    def init_forward_metadata(self, *_: Any, **__: Any) -> None:
        pass

    def get_verify_buffers_to_fill_after_draft(self) -> tuple[None, None]:
        return None, None


def prepare_worker(attention: AttentionStub, *, overlaps: bool) -> None:
    """Have SGLang's draft worker use the stub, and share no weights with the target. Raises EngineError where this
    SGLang has another worker for a loop that does not overlap."""
    if not overlaps and find_spec("sglang.srt.speculative.eagle_worker") is not None:
        raise EngineError(
            "SGLang's own scheduler cannot be run with this scenario yet: speculation without overlap needs a serial"
            " worker, which this SGLang still has (EAGLEWorker.forward_batch_generation)"
        )
    factory = import_module("sglang.srt.speculative.draft_utils").DraftBackendFactory
    factory.create_decode_backend = factory.create_draft_extend_backend = lambda _: attention
    worker = import_module("sglang.srt.speculative.eagle_worker_v2").EagleDraftWorker
    worker.init_lm_head = lambda _: None


def simulate(acceptance: SimulatedAcceptance) -> None:
    """Have SGLang simulate how many drafts are accepted, by its own settings, which it reads as it is imported."""
    module: Any
    for name, module in list(sys.modules.items()):
        if name.startswith("sglang.srt.speculative.") and hasattr(module, _SIMULATOR):
            settings = {"simulate_acc_len": acceptance.mean, "simulate_acc_method": acceptance.method}
            setattr(module, _SIMULATOR, partial(getattr(module, _SIMULATOR), **settings))
            module.SIMULATE_ACC_LEN = acceptance.mean


def wrap_worker(worker: Any, bridge: RunBridge, reports: RunBridge) -> None:
    """Report the ranges of the worker's forwards."""

    def ranged(
        original: Callable[..., Any],
        name: str,
        number: Callable[[int], int],
        batch: Any,
        *rest: Any,
        **options: Any,
    ) -> Any:
        with reports.range(name, len(batch.seq_lens), number(bridge.step)):
            return original(batch, *rest, **options)

    for holder, methods in ((worker, _VERIFY), (worker.draft_worker, _DRAFT)):
        for method, (name, number) in methods.items():
            setattr(holder, method, partial(ranged, getattr(holder, method), name, number))


class EagleForwards:
    """The target's forward over chains, and the draft's forwards, on SGLang's positions and slots. All but those over
    prompts replay graphs, which the constructor captures on the current stream."""

    def __init__(self, model: EngineModel, decoder: Model, pages: torch.Tensor) -> None:
        config, spec = model.config, model.config.speculative
        assert spec is not None
        self._decoder, self._draft = decoder, model.draft(pages)
        self._count = spec.draft_tokens
        most = max(config.max_running_requests, *graph_sizes(config))  # a graph may be padded beyond
        self._lens = torch.full((most,), self._count, dtype=torch.int32, device=config.device)
        one, each = GraphInput((), torch.int64), GraphInput((self._count,), torch.int64)
        size, dtype = model.hidden
        hidden, hiddens = GraphInput((size,), dtype), GraphInput((self._count, size), dtype)
        graphed = partial(GraphedFunction, config=config, longest=pages.shape[1])
        self._verify = graphed(self._verified, [each, each, each, one, one])
        self._step = graphed(self._drafted, [one, one, one, one, one, hidden])
        self._extend = graphed(self._extended, [each, each, each, one, one, hiddens])

    def verify(self, batch: ForwardBatch) -> Sequence[torch.Tensor]:
        """Logits and hidden states behind each token of the chains; ``batch.seq_lens`` does not count them."""
        return self._verify(*self._chains(batch), max_seq_len=batch.max_seq_len + self._count)

    def draft(self, batch: ForwardBatch, hidden: torch.Tensor) -> Sequence[torch.Tensor]:
        """Logits and hidden states of the draft, whose ``hidden`` states [T, hidden] are those of the positions before:
        behind a prompt's last token, behind one token, or behind each of a chain's."""
        if batch.mode is ForwardMode.DRAFT:
            rows = (batch.input_ids, batch.positions, batch.out_cache_loc, batch.req_pool_indices)
            return self._step(*rows, batch.seq_lens, hidden, max_seq_len=batch.max_seq_len + self._count)
        if batch.mode is ForwardMode.DRAFT_EXTEND:
            each = hidden.view(batch.batch_size, self._count, -1)
            return self._extend(*self._chains(batch), each, max_seq_len=batch.max_seq_len)
        last = last_tokens(self._draft.forward(batch, hidden), batch.extend_lens)
        return self._draft.logits(last), last

    def _chains(self, batch: ForwardBatch) -> Sequence[torch.Tensor]:
        each = (batch.input_ids, batch.positions, batch.out_cache_loc)
        return (*(rows.view(-1, self._count) for rows in each), batch.req_pool_indices, batch.seq_lens)

    def _verified(self, *given: Any) -> Sequence[torch.Tensor]:
        *tensors, longest = given
        tensors[-1] = tensors[-1] + self._count
        output = self._decoder.forward(self._chain_batch(ForwardMode.TARGET_VERIFY, tensors, longest))
        assert output.hidden_states is not None
        return output.logits, output.hidden_states

    def _extended(self, *given: Any) -> Sequence[torch.Tensor]:
        *tensors, hidden, longest = given
        batch = self._chain_batch(ForwardMode.DRAFT_EXTEND, tensors, longest)
        out = self._draft.forward(batch, hidden.reshape(batch.num_tokens, -1))
        return self._draft.logits(out), out

    def _chain_batch(self, mode: ForwardMode, tensors: Sequence[torch.Tensor], longest: int) -> ForwardBatch:
        ids, positions, slots, rows, ends = tensors
        return ForwardBatch(
            mode=mode,
            batch_size=ids.shape[0],
            num_tokens=ids.numel(),
            input_ids=ids.reshape(-1),
            positions=positions.reshape(-1),
            req_pool_indices=rows,
            seq_lens=ends,
            out_cache_loc=slots.reshape(-1),
            max_seq_len=longest,
            extend_lens=self._lens[: ids.shape[0]],
            max_extend_len=self._count,
            capture_hidden=mode is ForwardMode.TARGET_VERIFY,
        )

    def _drafted(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        rows: torch.Tensor,
        ends: torch.Tensor,
        hidden: torch.Tensor,
        longest: int,
    ) -> Sequence[torch.Tensor]:
        batch = ForwardBatch(
            mode=ForwardMode.DRAFT,
            batch_size=ids.shape[0],
            num_tokens=ids.shape[0],
            input_ids=ids,
            positions=positions,
            req_pool_indices=rows,
            seq_lens=ends,
            out_cache_loc=slots,
            max_seq_len=longest,
        )
        out = self._draft.forward(batch, hidden)
        return self._draft.logits(out), out
