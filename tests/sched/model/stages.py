"""A stage on which tests run requests through a decoder, in any chunks, batches and pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from schedbench.sched.batch import ForwardBatch, ForwardMode
from schedbench.sched.kernels.rows import decode_positions, extend_positions
from schedbench.sched.memory.pools import IndexPool, KVPool
from schedbench.sched.model.config import ModelConfig
from schedbench.sched.model.decoder import Decoder, Model
from schedbench.sched.model.sparse import PageTableLocator, SparseAttention
from schedbench.sched.model.weights import Weights

CPU = torch.device("cpu")


def kv_pool(config: ModelConfig, tokens: int, *, page_size: int = 1, device: torch.device = CPU) -> KVPool:
    return KVPool(
        num_layers=config.num_layers,
        tokens=tokens,
        page_size=page_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=config.dtype,
        device=device,
    )


def forward_batch(
    req_to_token: torch.Tensor, parts: Sequence[tuple[int, int, Sequence[int]]], *, decode: bool = False
) -> ForwardBatch:
    """``parts`` are a row, the position of its first new token, and its new tokens."""
    ids = [token for _, _, tokens in parts for token in tokens]
    lens = torch.tensor([len(tokens) for _, _, tokens in parts], dtype=torch.int32)
    prefixes = torch.tensor([start for _, start, _ in parts], dtype=torch.int32)
    seq_lens = (prefixes + lens).long()
    slots = [req_to_token[row, start : start + len(tokens)] for row, start, tokens in parts]
    return ForwardBatch(
        mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND,
        input_ids=torch.tensor(ids),
        positions=decode_positions(seq_lens) if decode else extend_positions(seq_lens, lens, len(ids)),
        req_pool_indices=torch.tensor([row for row, _, _ in parts]),
        seq_lens=seq_lens,
        out_cache_loc=torch.cat(slots).long(),
        max_seq_len=int(seq_lens.max()),
        extend_lens=None if decode else lens,
        extend_prefix_lens=None if decode else prefixes,
        max_extend_len=int(lens.max()),
    )


@dataclass(eq=False)
class CachedTokens:
    """The tokens of one request, and how many of them the cache already holds."""

    row: int
    tokens: list[int]
    cached: int = 0


@dataclass(eq=False)
class ModelStage:
    """Slots are handed out in random pages; nothing is ever freed."""

    req_to_token: torch.Tensor
    page_size: int
    free: list[int]
    model: Model
    entered: list[CachedTokens] = field(default_factory=list)

    def enter(self, tokens: Sequence[int]) -> CachedTokens:
        sequence = CachedTokens(len(self.entered) + 1, list(tokens))
        self.entered.append(sequence)
        return sequence

    def batch(self, parts: Sequence[tuple[CachedTokens, int]]) -> ForwardBatch:
        """The next ``n`` tokens of each sequence; a decode when each has one and something is cached."""
        for sequence, n in parts:
            self._allocate(sequence, sequence.cached + n)
        return self.batch_on_given_slots(parts)

    def batch_on_given_slots(self, parts: Sequence[tuple[CachedTokens, int]]) -> ForwardBatch:
        decode = all(n == 1 and s.cached for s, n in parts)
        given = [(s.row, s.cached, s.tokens[s.cached : s.cached + n]) for s, n in parts]
        for sequence, n in parts:
            sequence.cached += n
        return forward_batch(self.req_to_token, given, decode=decode)

    def logits(self, *parts: tuple[CachedTokens, int]) -> torch.Tensor:
        return self.model.forward(self.batch(parts)).logits

    def greedy(self, tokens: Sequence[int], count: int) -> list[int]:
        """``count`` tokens after ``tokens``, prompt in one piece."""
        sequence = self.enter(tokens)
        for _ in range(count):
            logits = self.logits((sequence, len(sequence.tokens) - sequence.cached))
            sequence.tokens.append(int(logits[0].argmax()))
        return sequence.tokens[-count:]

    def refill(self) -> None:
        """All slots are free again."""
        used = self.req_to_token[self.req_to_token > 0] // self.page_size
        self.free += used.unique().tolist()
        self.req_to_token.zero_()

    def _allocate(self, sequence: CachedTokens, length: int) -> None:
        page = self.page_size
        for start in range(-(-sequence.cached // page) * page, length, page):
            first = self.free.pop() * page
            self.req_to_token[sequence.row, start : start + page] = torch.arange(first, first + page)


def pages(count: int, seed: int) -> list[int]:
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)) + 1
    return order.tolist()


def bare_stage(model: Model, req_to_token: torch.Tensor, *, page_size: int = 1, seed: int = 0) -> ModelStage:
    """A stage round a model that has its page table already."""
    tokens = (req_to_token.shape[0] - 1) * req_to_token.shape[1]
    return ModelStage(req_to_token, page_size, pages(tokens // page_size, seed), model)


def sparse_attention(config: ModelConfig, kv: KVPool, req_to_token: torch.Tensor) -> SparseAttention:
    """With all KV on the device."""
    assert config.indexer is not None
    index = IndexPool(
        num_layers=config.num_layers,
        slots=kv.slots,
        head_dim=config.indexer.head_dim,
        dtype=config.dtype,
        device=CPU,
    )
    locator = PageTableLocator(req_to_token)
    return SparseAttention(
        config,
        config.indexer,
        index=index,
        req_to_token=req_to_token,
        locator=locator,
        reuse=None,
    )


def decoder_stage(config: ModelConfig, weights: Weights, *, page_size: int = 1, seed: int = 0) -> ModelStage:
    rows, context = 16, 512
    kv = kv_pool(config, rows * context, page_size=page_size)
    req_to_token = torch.zeros(rows + 1, context, dtype=torch.int32)
    sparse = None if config.indexer is None else sparse_attention(config, kv, req_to_token)
    decoder = Decoder(config, weights, kv=kv, req_to_token=req_to_token, sparse=sparse)
    return bare_stage(decoder, req_to_token, page_size=page_size, seed=seed)
