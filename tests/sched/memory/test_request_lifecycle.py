"""Requests through pools and caches with simulated KV: each slot stores which prefix it holds."""

from __future__ import annotations

import random
from array import array

import pytest
import torch

from schedbench.sched.config import SamplingParams
from schedbench.sched.kernels.allocation import upload_prefix_pointers, write_cache_indices
from schedbench.sched.memory.allocation import alloc_for_decode, alloc_for_extend, release_kv_cache
from schedbench.sched.memory.cache import ChunkCache, PrefixCache, RadixCache
from schedbench.sched.memory.invariants import check, lost_tokens
from schedbench.sched.memory.pools import KVAllocator, PagedAllocator, ReqToTokenPool
from schedbench.sched.request import Request

CPU = torch.device("cpu")


def lens(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


class Engine:
    """The part of a scheduler that memory needs, and a KV cache that stores prefixes instead of numbers."""

    def __init__(self, *, radix: bool, page_size: int, tokens: int = 160) -> None:
        allocator: KVAllocator = (
            KVAllocator(tokens, 1, CPU)
            if page_size == 1
            else PagedAllocator(tokens, page_size=page_size, device=CPU)
        )
        pool = ReqToTokenPool(4, 128, device=CPU)
        self.cache: PrefixCache = RadixCache(pool, allocator) if radix else ChunkCache(pool, allocator)
        self.kv: dict[int, tuple[int, ...]] = {}
        self.live: list[Request] = []

    def row(self, req: Request) -> list[int]:
        row: list[int] = self.cache.req_to_token_pool.req_to_token[req.req_pool_idx].tolist()
        return row

    def room(self, num_tokens: int) -> bool:
        free = self.cache.token_to_kv_pool_allocator.available_size()
        return num_tokens <= free + self.cache.evictable_size()

    def admit(self, prompts: list[list[int]], chunk: int) -> list[Request]:
        rows = self.cache.req_to_token_pool.alloc(len(prompts))
        if rows is None:
            return []
        joined = [self.join(prompt, row) for prompt, row in zip(prompts, rows, strict=True)]
        if self.room(sum(len(prompt) for prompt in prompts) + self.cache.page_size * len(prompts)):
            self.extend(joined, chunk)
            return joined
        for req in joined:
            self.release(req, is_insert=False)
        return []

    def join(self, prompt: list[int], row: int) -> Request:
        req = Request(str(len(self.kv)), array("q", prompt), SamplingParams(), arrival=0)
        match = self.cache.match_prefix(req.origin_input_ids[:-1])
        req.prefix_indices, req.last_node = match.device_indices, match.last_node
        req.cache_protected_len = match.matched
        req.req_pool_idx = row
        self.cache.inc_lock_ref(req.last_node)
        self.live.append(req)
        return req

    def extend(self, reqs: list[Request], chunk: int) -> None:
        prefixes = [req.prefix_indices for req in reqs if req.prefix_indices is not None]
        before = [prefix.shape[0] for prefix in prefixes]
        after = [min(req.seqlen, start + chunk) for req, start in zip(reqs, before, strict=True)]
        prefix_lens, seq_lens = lens(before), lens(after)
        extents, count = (prefix_lens, seq_lens), sum(after) - sum(before)
        slots = alloc_for_extend(self.cache, prefixes, count, on_device=extents, on_host=extents)
        write_cache_indices(
            self.cache.req_to_token_pool.req_to_token,
            lens([req.req_pool_idx or 0 for req in reqs]),
            prefix_tensors=prefixes,
            prefix_pointers=upload_prefix_pointers(prefixes, CPU),
            prefix_lens=prefix_lens,
            seq_lens=seq_lens,
            extend_lens=seq_lens - prefix_lens,
            out_cache_loc=slots,
        )
        for req, start, stop in zip(reqs, before, after, strict=True):
            req.fill_len = req.kv_committed_len = req.kv_allocated_len = stop
            self.compute(req, start, stop)
        for req in reqs:
            self.cache.cache_unfinished_req(req)
            self.sample(req)

    def decode(self, reqs: list[Request]) -> None:
        rows = lens([req.req_pool_idx or 0 for req in reqs])
        locs = lens([req.kv_committed_len for req in reqs])
        slots = alloc_for_decode(self.cache, req_pool_indices=rows, seq_lens=locs, seq_lens_cpu=locs)
        self.cache.req_to_token_pool.req_to_token[rows, locs] = slots.to(torch.int32)
        for req in reqs:
            req.kv_committed_len += 1
            req.kv_allocated_len += 1
            self.compute(req, req.kv_committed_len - 1, req.kv_committed_len)
            self.sample(req)

    def compute(self, req: Request, start: int, stop: int) -> None:
        row = self.row(req)
        for position in range(start, stop):
            self.kv[row[position]] = tuple(req.tokens(0, position + 1))

    def sample(self, req: Request) -> None:
        if req.kv_committed_len == req.seqlen:
            req.output_ids.append(7)

    def release(self, req: Request, *, is_insert: bool) -> None:
        release_kv_cache(req, self.cache, is_insert=is_insert)
        self.live.remove(req)

    def verify(self) -> None:
        """Every row, and every node of the tree, leads to the KV of its own tokens."""
        check(self.cache, self.live)
        for req in self.live:
            row = self.row(req)
            for position in range(req.kv_committed_len):
                assert self.kv[row[position]] == tuple(req.tokens(0, position + 1))
        if isinstance(self.cache, RadixCache):
            for node in self.cache.tree.nodes():
                for slot, token in zip(node.value.tolist(), node.key.tolist(), strict=True):
                    assert self.kv[slot][-1] == token


@pytest.fixture(params=[1, 4, 16])
def page_size(request: pytest.FixtureRequest) -> int:
    size: int = request.param
    return size


class RandomTraffic:
    """Random traffic: few distinct prompts over a small pool, so that matches, splits, equal prompts, chunks, evictions
    and exhausted rows and tokens all happen often."""

    PARTS = ([1] * 5, [2] * 3, [3] * 16, [4], list(range(20)))

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.random = random.Random(seed)

    def step(self) -> None:
        actions = (
            self.admit,
            self.admit,
            self.continue_chunk,
            self.decode,
            self.decode,
            self.release,
            self.evict,
        )
        self.random.choice(actions)()

    def admit(self) -> None:
        prompts = [self.prompt() for _ in range(self.random.randint(1, 2))]
        self.engine.admit(prompts, self.random.choice((16, 32, 128)))

    def prompt(self) -> list[int]:
        parts = self.random.choices(self.PARTS, k=self.random.randint(1, 6))
        return [token for part in parts for token in part]

    def continue_chunk(self) -> None:
        chunk = self.random.choice((8, 48))
        waiting = [req for req in self.engine.live if not req.output_ids]
        if waiting and self.engine.room(chunk + self.engine.cache.page_size):
            self.engine.extend(waiting[:1], chunk)

    def decode(self) -> None:
        reqs = [req for req in self.engine.live if req.output_ids]
        if reqs and self.engine.room(len(reqs) * self.engine.cache.page_size):
            self.engine.decode(reqs)

    def release(self) -> None:
        if self.engine.live:
            req = self.random.choice(self.engine.live)
            self.engine.release(req, is_insert=self.random.random() < 0.7)

    def evict(self) -> None:
        self.engine.cache.evict(self.random.randint(1, 60))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("radix", [True, False], ids=["radix", "chunk"])
def test_random_traffic_keeps_every_row_and_node_on_its_own_kv(
    page_size: int, radix: bool, seed: int
) -> None:
    engine = Engine(radix=radix, page_size=page_size)
    traffic = RandomTraffic(engine, seed)
    for _ in range(200):
        traffic.step()
        engine.verify()

    for req in list(engine.live):
        engine.release(req, is_insert=True)
    engine.cache.evict(engine.cache.evictable_size() + engine.cache.protected_size())
    allocator = engine.cache.token_to_kv_pool_allocator
    assert allocator.available_size() == allocator.size


def test_a_second_request_reuses_the_pages_of_the_first(page_size: int) -> None:
    engine = Engine(radix=True, page_size=page_size)
    (first,) = engine.admit([list(range(40))], chunk=128)
    engine.release(first, is_insert=True)

    (second,) = engine.admit([list(range(33))], chunk=128)

    assert second.cache_protected_len == 33 // page_size * page_size
    assert lost_tokens(engine.cache, engine.live) == 0
    engine.verify()


def test_a_partial_page_stays_with_the_request(page_size: int) -> None:
    engine = Engine(radix=True, page_size=page_size)
    (req,) = engine.admit([list(range(35))], chunk=128)

    assert req.prefix_indices is not None
    assert req.prefix_indices.tolist() == engine.row(req)[:35]
    assert req.cache_protected_len == 35 // page_size * page_size


def test_a_retracted_request_leaves_only_what_the_tree_had(page_size: int) -> None:
    engine = Engine(radix=True, page_size=page_size)
    (req,) = engine.admit([list(range(32))], chunk=128)
    for _ in range(5):
        engine.decode([req])

    engine.release(req, is_insert=False)

    assert engine.cache.evictable_size() == 32
    assert lost_tokens(engine.cache, []) == 0


def test_a_released_request_owns_nothing() -> None:
    engine = Engine(radix=True, page_size=4)
    (req,) = engine.admit([list(range(10))], chunk=128)

    engine.release(req, is_insert=True)

    assert req.req_pool_idx is None
    assert req.prefix_indices is None
    assert (req.cache_protected_len, req.kv_committed_len, req.kv_allocated_len) == (0, 0, 0)
    assert engine.cache.protected_size() == 0


def test_speculation_gives_back_what_it_allocated_ahead() -> None:
    engine = Engine(radix=True, page_size=4)
    (req,) = engine.admit([list(range(10))], chunk=128)
    ahead = engine.cache.token_to_kv_pool_allocator.alloc(8)
    assert ahead is not None
    engine.cache.req_to_token_pool.req_to_token[req.req_pool_idx, 12:20] = ahead.to(torch.int32)
    req.kv_allocated_len = 20

    with pytest.raises(AssertionError, match="allocated ahead"):
        release_kv_cache(req, engine.cache)
    release_kv_cache(req, engine.cache, speculative=True)

    check(engine.cache, [])


def test_a_request_without_a_row_cannot_be_released() -> None:
    engine = Engine(radix=True, page_size=4)
    req = Request("a", array("q", [1]), SamplingParams(), arrival=0)
    with pytest.raises(AssertionError, match="holds no row"):
        release_kv_cache(req, engine.cache)
