"""Schedbench's decoder in the place of the model of an engine whose attention reads slots to write and block tables."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...sched.batch import ForwardBatch, ForwardMode, ModelOutput
from ...sched.kernels.declare import kernel, meta_tensor
from ...sched.kernels.rows import embedding
from ...sched.model.decoder import Decoder
from ..run.compose import engine_config
from ..run.system import SystemParts, TagAudit
from .bridge import EngineSystem
from .model import EngineModel, long, tagged_ids


class PagedModel:
    """Finds KV where the engine's attention does. ``replayed``: the rows of the CUDA graph that made the last hidden
    states, None where none did. ``spare`` is a slot that no request has, to which padding is written."""

    def __init__(self, parts: SystemParts, spare: int) -> None:
        self.made = EngineModel(parts)
        self._spare = spare
        self.replayed: int | None = None
        self._decoder: Decoder
        self._fingerprint: Tensor | None = None  # of the last forward that was not replayed
        self._captured: dict[int, Tensor | None] = {}  # fingerprints of decodes, by rows

    def hidden(
        self,
        input_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        starts: Tensor | None,
        ends: Tensor,
        block_tables: Tensor | None,
        width: int,
        longest: int,
    ) -> Tensor:
        """The hidden states [T, hidden] behind the final norm. ``width`` bounds the positions of a request, and
        ``longest`` its new tokens; for the rest see ``paged_inputs``. A batch without ``starts`` is a decode."""
        sizes = (self.made.config.page_size, self._spare, width)
        slots, lens, new, rows, pages = paged_inputs(slot_mapping, starts, ends, block_tables, *sizes)
        self._decoder = self.made.bare_decoder(pages)
        prompts = starts is not None
        output = self.made.tagged(_Layers(self._decoder), pages).forward(
            ForwardBatch(
                mode=ForwardMode.EXTEND if prompts else ForwardMode.DECODE,
                input_ids=long(input_ids),
                positions=long(positions),
                req_pool_indices=rows,
                seq_lens=lens,
                out_cache_loc=slots,
                max_seq_len=width,
                extend_lens=new if prompts else None,
                extend_prefix_lens=lens - new if prompts else None,
                max_extend_len=longest,
            )
        )
        self.replayed = None
        self._fingerprint = output.fingerprint
        if not prompts:
            self._captured[len(lens)] = output.fingerprint
        return output.logits

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits [b, vocab] of the hidden states [b, hidden] of tokens."""
        return self._decoder.logits(hidden)

    def sampled(self, logits: Tensor, ids: Tensor) -> Tensor:
        """With values none: the sampled ids [b] replaced by those that follow from the KV tags."""
        replayed = self.replayed
        fingerprint = self._fingerprint if replayed is None else self._captured[replayed]
        return tagged_ids(ids, logits, None if fingerprint is None else fingerprint[: len(ids)])


class PagedSystem(EngineSystem):
    """The system of an engine that has such a model, and a list of blocks for each request."""

    model: PagedModel

    def __init__(self, parts: SystemParts) -> None:
        super().__init__(parts)
        self._config = engine_config(parts.resolved, parts.machine)
        self._slots = torch.zeros(1, self._config.context_len, dtype=torch.int32)  # of the request that ends

    def audit(self) -> TagAudit | None:
        tags, peek = self.model.made.tags, self._parts.machine.peek
        if tags is None:
            return None
        return TagAudit(tags, self._slots, lambda tensor: tensor if tensor is self._slots else peek(tensor))

    def _ending(self, name: str, blocks: Sequence[int]) -> None:
        """The KV in the request's blocks is about to be released."""
        page = self._config.page_size
        slots = torch.tensor(blocks, dtype=torch.int32).unsqueeze(1) * page + torch.arange(page)
        self._slots[0, : slots.numel()] = slots.flatten()[: self._slots.shape[1]]
        self._reports.ending(name, 0)


class _Layers:
    """A decoder up to its final norm."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def forward(self, batch: ForwardBatch) -> ModelOutput:
        """``logits`` are the hidden states."""
        embedded = embedding(batch.input_ids, self._decoder.weights.embedding)
        return ModelOutput(self._decoder.layers(embedded, batch))


def _paged_meta(
    slot_mapping: Tensor, starts: Tensor | None, ends: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    b = (ends if starts is None else starts).shape[0] - (starts is not None)
    rows = meta_tensor(b), meta_tensor(b, dtype=torch.int32), meta_tensor(b)
    return meta_tensor(slot_mapping.shape[0]), *rows, meta_tensor(b, width, dtype=torch.int32)


@kernel(meta=_paged_meta, cost=None)
def paged_inputs(
    slot_mapping: Tensor,
    starts: Tensor | None,
    ends: Tensor,
    block_tables: Tensor | None,
    page_size: int,
    spare: int,
    width: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What an engine's attention kernels read, in the form of schedbench's: the slots [T] int64 that are written, the
    lengths [b] int64, the new tokens of each request [b] int32, rows [b] int64 of the last result, and the slots
    [b, width] int32 of all positions.

    ``slot_mapping`` [T] is -1 for padding, which writes to ``spare``. ``starts`` [b + 1] int32 are the running sums of
    new tokens, None where each request has one. ``ends`` are the lengths [b], 0 for padding, or their running sums
    [b + 1]. Without ``block_tables`` [b, n] int32 all tokens of the prompts are new.
    """
    new = torch.ones_like(ends) if starts is None else starts.diff()
    lengths = ends if len(ends) == len(new) else ends.diff()
    lens = lengths.clamp(1, width)  # also of what is not written yet
    slots = torch.where(slot_mapping < 0, spare, slot_mapping)
    places = torch.arange(width, dtype=torch.int32, device=ends.device)
    if block_tables is None:
        pages = ends.new_zeros(len(lens), width)
        pages[places < lens.unsqueeze(1)] = slot_mapping
    else:
        of_block = block_tables.clamp(min=0)[:, places // page_size]
        pages = of_block * page_size + places % page_size
    rows = torch.arange(len(lens), device=ends.device)
    return slots.to(torch.int64), lens.to(torch.int64), new.to(torch.int32), rows, pages.to(torch.int32)
