"""SGLang's EAGLE workers with schedbench's draft: what their two model runners compute, and their ranges.

The workers, their kernels, the verdict and the relay are SGLang's.
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
from ....sched.config import SimulatedAcceptance, SpeculativeConfig
from ....sched.kernels.rows import last_tokens
from ....sched.model.decoder import Model
from ....sched.model.runner import GraphedFunction, GraphInput, graph_sizes
from ...vgpu.fused import run_as_one_kernel
from ..bridge import RunBridge, wrap_methods
from ..model import EngineModel
from ..names import EngineError
from .kernels import mask_cells

# Methods of the worker and of what drafts, which is the serial worker itself: the range of each, and its step among
# those of an iteration.
_VERIFY: Final = {"verify": ("verify", int)}
_DRAFT: Final = {
    "draft": ("draft", draft_step),
    "_draft_extend_for_decode": ("draft_extend", extend_step),
    "_draft_extend_for_prefill": ("draft_extend", extend_step),
    "forward_draft_extend": ("draft_extend", extend_step),
    "forward_draft_extend_after_decode": ("draft_extend", extend_step),
}
_SERIAL: Final = "sglang.srt.speculative.eagle_worker"
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


def prepare_worker(attention: AttentionStub, spec: SpeculativeConfig, *, overlaps: bool) -> None:
    """Have SGLang's draft worker use the stub, and share no weights with the target. Raises EngineError where this
    SGLang has not the worker that the scenario names for its loop."""
    has_serial = find_spec(_SERIAL) is not None
    if spec.mode == "v1" and not has_serial:
        raise EngineError(
            "SGLang's own scheduler cannot be run with this scenario: speculation v1 needs a serial worker"
            " (EAGLEWorker.forward_batch_generation), which this SGLang no longer has: engine.speculative.mode=v2"
        )
    if spec.mode == "v2" and not overlaps and has_serial:
        raise EngineError(
            "SGLang's own scheduler cannot be run with this scenario: this SGLang has a serial worker for a loop"
            " without overlap (EAGLEWorker.forward_batch_generation): engine.speculative.mode=v1"
        )
    factory = import_module("sglang.srt.speculative.draft_utils").DraftBackendFactory
    factory.create_decode_backend = factory.create_draft_extend_backend = lambda _: attention
    worker = import_module("sglang.srt.speculative.eagle_worker_v2").EagleDraftWorker
    worker.init_lm_head = lambda _: None


def without_weights(model: Any) -> None:
    """Give the stub of a model what the serial worker calls to share weights between draft and target."""
    model.get_embed_and_head = lambda: (None, None)
    model.set_embed_and_head = lambda *_: None


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

    def inside(
        name: str,
        number: Callable[[int], int],
        original: Callable[..., Any],
        batch: Any,
        *rest: Any,
        **options: Any,
    ) -> Any:
        with reports.range(name, len(batch.seq_lens), number(bridge.step)):
            return original(batch, *rest, **options)

    for holder, methods in ((worker, _VERIFY), (getattr(worker, "draft_worker", worker), _DRAFT)):
        wrap_methods(holder, {}, {method: partial(inside, *named) for method, named in methods.items()})


class EagleForwards:
    """The target's forward over drafts, and the draft's forwards, on SGLang's positions and slots. All but those over
    prompts and over what the serial worker has accepted replay graphs, which the constructor captures on the current
    stream. The drafts that a token of a tree sees are those of SGLang's mask, and in drafting those of its branch."""

    def __init__(self, model: EngineModel, decoder: Model, pages: torch.Tensor) -> None:
        config, spec = model.config, model.config.speculative
        assert spec is not None
        self._decoder, self._draft = decoder, model.draft(pages)
        self._count, self._topk, self._depth = spec.draft_tokens, spec.topk, spec.most_accepted
        most = max(config.max_running_requests, *graph_sizes(config))  # a graph may be padded beyond
        self._lens = torch.full((most,), self._count, dtype=torch.int32, device=config.device)
        one, each, branch = (GraphInput(shape, torch.int64) for shape in ((), (self._count,), (self._topk,)))
        size, dtype = model.hidden
        hidden, hiddens = (GraphInput((count, size), dtype) for count in (self._topk, self._count))
        seen, drafted = (GraphInput((count, self._depth), torch.int64) for count in (self._count, self._topk))
        graphed = partial(GraphedFunction, config=config, longest=pages.shape[1])
        tree, branches = ([seen, each], [drafted, branch]) if self._topk > 1 else ([], [])
        self._verify = graphed(self._verified, [each, each, each, one, one, *tree])
        self._step = graphed(self._drafted, [branch, branch, branch, one, one, hidden, *branches])
        self._extend = graphed(self._extended, [each, each, each, one, one, hiddens])

    def verify(self, batch: ForwardBatch, mask: torch.Tensor) -> Sequence[torch.Tensor]:
        """Logits and hidden states behind each draft; ``batch.seq_lens`` does not count them. ``mask`` is SGLang's, of
        what each draft sees of the tokens before it."""
        given = self._by_request(batch, self._count)
        if self._topk > 1:
            depth = self._depth
            given += run_as_one_kernel(
                "drafts of mask", _seen, mask, batch.seq_lens, batch.out_cache_loc, depth
            )
        return self._verify(*given, max_seq_len=batch.max_seq_len + self._count)

    def draft(
        self, batch: ForwardBatch, hidden: torch.Tensor, slots: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Logits and hidden states of the draft, whose ``hidden`` states [T, hidden] are those of the positions before:
        behind a prompt's last token, behind one token of each branch, or behind each of a chain's. ``slots`` [T] of the
        drafts are those of each step until now, this one included; ``batch.seq_lens`` does not count them."""
        if batch.mode is ForwardMode.DRAFT:
            given = self._by_request(batch, self._topk)
            given[-1] = given[-1] + len(slots)
            given.append(hidden.view(batch.batch_size, self._topk, -1))
            if self._topk > 1:
                sizes = (self._topk, self._depth)
                given += run_as_one_kernel("drafts of branches", _branches, slots, *sizes)
            return self._step(*given, max_seq_len=batch.max_seq_len + self._count)
        if batch.mode is ForwardMode.DRAFT_EXTEND:
            each = hidden.view(batch.batch_size, self._count, -1)
            given = self._by_request(batch, self._count)
            return self._extend(*given, each, max_seq_len=batch.max_seq_len)
        last = last_tokens(self._draft.forward(batch, hidden), batch.extend_lens)
        return self._draft.logits(last), last

    def _by_request(self, batch: ForwardBatch, count: int) -> list[torch.Tensor]:
        """Ids, positions and slots [b, count], rows and lengths [b]."""
        each = (batch.input_ids, batch.positions, batch.out_cache_loc)
        return [*(tokens.reshape(-1, count) for tokens in each), batch.req_pool_indices, batch.seq_lens]

    def _verified(self, *given: Any) -> Sequence[torch.Tensor]:
        *tensors, longest = given
        if self._topk > 1:
            batch = _tree_batch(ForwardMode.TARGET_VERIFY, tensors, longest)
        else:
            tensors[-1] = tensors[-1] + self._count
            batch = self._chain_batch(ForwardMode.TARGET_VERIFY, tensors, longest)
        output = self._decoder.forward(batch)
        assert output.hidden_states is not None
        return output.logits, output.hidden_states

    def _extended(self, *given: Any) -> Sequence[torch.Tensor]:
        *tensors, hidden, longest = given
        batch = self._chain_batch(ForwardMode.DRAFT_EXTEND, tensors, longest)
        out = self._draft.forward(batch, hidden.reshape(batch.num_tokens, -1))
        return self._draft.logits(out), out

    def _chain_batch(self, mode: ForwardMode, tensors: Sequence[torch.Tensor], longest: int) -> ForwardBatch:
        lens = self._lens[: len(tensors[0])]
        return _batch(mode, longest, *tensors, extend_lens=lens, max_extend_len=self._count)

    def _drafted(self, *given: Any) -> Sequence[torch.Tensor]:
        *tensors, longest = given
        hidden = tensors.pop(5).flatten(0, 1)
        if self._topk > 1:
            batch = _tree_batch(ForwardMode.DRAFT, tensors, longest)
        else:
            batch = _batch(ForwardMode.DRAFT, longest, *tensors)
        out = self._draft.forward(batch, hidden)
        return self._draft.logits(out), out


def _batch(
    mode: ForwardMode,
    longest: int,
    ids: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    lens: torch.Tensor,
    **more: Any,
) -> ForwardBatch:
    """Ids, positions and slots of any shape, rows and lengths [b]."""
    return ForwardBatch(
        mode=mode,
        input_ids=ids.reshape(-1),
        positions=positions.reshape(-1),
        req_pool_indices=rows,
        seq_lens=lens,
        out_cache_loc=slots.reshape(-1),
        max_seq_len=longest,
        capture_hidden=mode is ForwardMode.TARGET_VERIFY,
        **more,
    )


def _tree_batch(mode: ForwardMode, tensors: Sequence[torch.Tensor], longest: int) -> ForwardBatch:
    """Every draft as a request of its own: ids, positions and slots [b, n], rows and lengths [b] without the drafts or,
    while drafting, with those of a branch, and of each draft the slots of those that it sees [b, n, depth], and how
    many [b, n]."""
    ids, positions, slots, rows, lens, branches, counts = tensors
    n = ids.shape[1]
    ends = (
        lens.unsqueeze(1) + counts if mode is ForwardMode.TARGET_VERIFY else lens.unsqueeze(1).expand(-1, n)
    )
    each = (ids, positions, slots, rows.repeat_interleave(n), ends.reshape(-1))
    return _batch(mode, longest, *each, branches=branches.flatten(0, 1), branch_lens=counts.reshape(-1))


def _seen(mask: torch.Tensor, lens: torch.Tensor, slots: torch.Tensor, depth: int) -> Sequence[torch.Tensor]:
    """Of each draft of trees, the slots of itself and the drafts before it that it sees [b, n, depth], and how many
    [b, n]. ``slots`` [b · n] are those of the drafts, and ``lens`` [b] lengths without them."""
    b = len(lens)
    count = slots.numel() // b
    seen = mask[mask_cells(lens, count)].to(torch.int8)
    drafts = seen.sort(dim=2, descending=True, stable=True).indices[..., :depth]
    each = slots.view(b, 1, count).expand(b, count, count)
    return each.gather(2, drafts.clamp(max=count - 1)), seen.sum(2)


def _branches(slots: Sequence[torch.Tensor], topk: int, depth: int) -> Sequence[torch.Tensor]:
    """Of each branch, the slots [b, topk, depth] of its drafts until now, and how many [b, topk]."""
    found = torch.stack(list(slots), 1)
    padded = torch.nn.functional.pad(found, (0, depth - len(slots))).view(-1, topk, depth)
    return padded, torch.full_like(padded[..., 0], len(slots))
