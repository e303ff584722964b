"""A stage on which tests run requests through a decoder, in any chunks, batches and pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from schedbench.sched.batch import ForwardBatch, ForwardMode
from schedbench.sched.kernels.rows import decode_positions, extend_positions
from schedbench.sched.memory.pools import IndexPool, KVPool
from schedbench.sched.model.config import ModelConfig
from schedbench.sched.model.decoder import Decoder, Model
from schedbench.sched.model.sparse import PageTableLocator, SparseAttention
from schedbench.sched.model.weights import Weights

CPU = torch.device("cpu")


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
        ids = [i for s, n in parts for i in s.tokens[s.cached : s.cached + n]]
        slots = torch.cat([self.req_to_token[s.row, s.cached : s.cached + n] for s, n in parts]).long()
        rows = torch.tensor([s.row for s, _ in parts])
        seq_lens = torch.tensor([s.cached + n for s, n in parts])
        lens = torch.tensor([n for _, n in parts], dtype=torch.int32)
        prefixes = torch.tensor([s.cached for s, _ in parts], dtype=torch.int32)
        decode = all(n == 1 and s.cached for s, n in parts)
        for sequence, n in parts:
            sequence.cached += n
        return ForwardBatch(
            mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND,
            batch_size=len(parts),
            num_tokens=len(ids),
            input_ids=torch.tensor(ids),
            positions=decode_positions(seq_lens) if decode else extend_positions(seq_lens, lens, len(ids)),
            req_pool_indices=rows,
            seq_lens=seq_lens,
            out_cache_loc=slots,
            max_seq_len=int(seq_lens.max()),
            extend_lens=None if decode else lens,
            extend_prefix_lens=None if decode else prefixes,
            max_extend_len=int(lens.max()),
        )

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


@pytest.fixture(autouse=True)
def plain_torch() -> Iterator[None]:
    """No gradients and one thread, unless a test asks for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def bare_stage() -> Callable[..., ModelStage]:
    """Builds a stage round a model that has its page table already."""

    def build(model: Model, req_to_token: torch.Tensor, *, page_size: int = 1, seed: int = 0) -> ModelStage:
        tokens = (req_to_token.shape[0] - 1) * req_to_token.shape[1]
        return ModelStage(req_to_token, page_size, pages(tokens // page_size, seed), model)

    return build


def sparse_attention(
    config: ModelConfig, weights: Weights, kv: KVPool, req_to_token: torch.Tensor
) -> SparseAttention:
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
        weights,
        kv=kv,
        index=index,
        req_to_token=req_to_token,
        locator=locator,
        reuse=None,
    )


@pytest.fixture
def stage(bare_stage: Callable[..., ModelStage]) -> Callable[..., ModelStage]:
    """Builds a stage round a decoder."""

    def build(
        config: ModelConfig,
        weights: Weights,
        *,
        page_size: int = 1,
        rows: int = 16,
        context: int = 512,
        seed: int = 0,
    ) -> ModelStage:
        tokens = rows * context
        kv = KVPool(
            num_layers=config.num_layers,
            tokens=tokens,
            page_size=page_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=config.dtype,
            device=CPU,
        )
        req_to_token = torch.zeros(rows + 1, context, dtype=torch.int32)
        sparse = None if config.indexer is None else sparse_attention(config, weights, kv, req_to_token)
        decoder = Decoder(config, weights, kv=kv, req_to_token=req_to_token, sparse=sparse)
        return bare_stage(decoder, req_to_token, page_size=page_size, seed=seed)

    return build
