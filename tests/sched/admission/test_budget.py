"""The budget of one admission round, compared with rounds computed by hand."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import pytest
import torch

from schedbench.sched.admission import Limits, PrefillBudget, future_growth
from schedbench.sched.config import CLIP_MAX_NEW_TOKENS, SamplingParams
from schedbench.sched.request import Request


@dataclass
class Pool:
    """Stands for the allocator and the radix tree: ``free`` tokens, and ``evictable`` ones until they are locked.
    ``unclaimed`` is what is left on a device whose KV moves to the host; each request claims its ``buffer``, or its
    prompt."""

    free: int
    evictable: int = 0
    unclaimed: int = 0
    buffer: int = 0
    locks: dict[str, int] = field(default_factory=dict)

    def available_size(self) -> int:
        return self.free

    def unclaimed_size(self) -> int:
        return self.unclaimed

    def claim(self, req: Request) -> int:
        return max(self.buffer, req.seqlen) if self.buffer else 0

    def evictable_size(self) -> int:
        return self.evictable

    def inc_lock_ref(self, node: tuple[str, int] | None) -> None:
        self._lock(node, 1)

    def dec_lock_ref(self, node: tuple[str, int] | None) -> None:
        self._lock(node, -1)

    def _lock(self, node: tuple[str, int] | None, by: int) -> None:
        if node is not None:
            name, size = node
            self.locks[name] = self.locks.get(name, 0) + by
            self.evictable -= by * size


def budget(pool: Pool, *, growth: float = 0.0, **limits: int | None) -> PrefillBudget:
    full: dict[str, int | None] = {
        "page_size": 1,
        "max_prefill_tokens": 1000,
        "chunked_prefill_size": None,
        "mixed_decode_tokens": 0,
        "mixed_reserve_tokens": 0,
    }
    return PrefillBudget(Limits(**(full | limits)), pool, pool, growth)  # type: ignore[arg-type]


def waiting(prompt: int, new: int = 10, *, cached: int = 0, node: str | None = None) -> Request:
    """A request whose prefix of ``cached`` tokens was matched."""
    req = Request("r", array("q", range(prompt)), SamplingParams(max_new_tokens=new), arrival=0)
    req.prefix_indices = torch.arange(cached)
    req.last_node = None if node is None else (node, cached)
    req.fill_len = prompt
    req.extend_input_len = prompt - cached
    return req


@pytest.mark.parametrize(("prompt", "taken"), [(20, 3), (30, 3), (31, 2), (90, 1), (91, 0)])
def test_prompts_of_a_round_share_the_unclaimed_device_tokens(prompt: int, taken: int) -> None:
    """Each prompt needs 30 tokens for its buffer; there are slots for all of them."""
    round_ = budget(Pool(free=1000, unclaimed=90, buffer=30))
    verdicts = [round_.try_add(waiting(prompt)) for _ in range(4)]
    assert len(round_.taken) == taken
    assert not verdicts[taken] and round_.out_of_kv


def test_a_request_reserves_its_prompt_and_its_limit() -> None:
    round_ = budget(Pool(200), growth=30.5)
    assert round_.rem_total == 169.5 and round_.cur_rem == 200
    assert round_.try_add(waiting(50, 20))
    assert round_.rem_total == 169.5 - 50 - 20
    assert round_.cur_rem == 200 - 50
    assert round_.rem_input == 1000 - 50


@pytest.mark.parametrize(("free", "fits"), [(61, False), (62, True)])
def test_a_request_needs_a_page_beyond_what_it_may_use(free: int, *, fits: bool) -> None:
    round_ = budget(Pool(free))
    assert round_.try_add(waiting(50, 10)) is fits  # 50 + 10 + 1 < free
    assert round_.out_of_kv is not fits
    assert len(round_.taken) == fits


def test_limits_beyond_the_clip_reserve_the_clip() -> None:
    round_ = budget(Pool(10_000))
    round_.try_add(waiting(10, 100_000))
    assert round_.rem_total == 10_000 - 10 - CLIP_MAX_NEW_TOKENS


def test_retracted_output_counts_as_prompt_and_no_longer_as_limit() -> None:
    req = waiting(50, 20)
    req.output_ids.extend(range(8))
    req.fill_len, req.extend_input_len = 58, 58
    round_ = budget(Pool(200))
    round_.try_add(req)
    assert round_.rem_total == 200 - 58 - 12


def test_a_prefix_is_evictable_until_it_is_locked() -> None:
    """Before the lock 100 tokens seem enough for 30 + 10 + 1; after it 40 are left."""
    pool = Pool(40, evictable=60)
    round_ = budget(pool)
    assert not round_.try_add(waiting(90, 10, cached=60, node="head")) and round_.out_of_kv
    assert pool.locks == {"head": 0} and pool.evictable == 60
    assert not round_.taken


def test_a_taken_request_keeps_its_lock_and_pays_only_for_the_rest() -> None:
    pool = Pool(60, evictable=60)
    round_ = budget(pool)
    assert round_.try_add(waiting(90, 10, cached=60, node="head"))
    assert pool.locks == {"head": 1}
    assert round_.rem_total == 60 - 30 - 10


def test_lengths_count_in_whole_pages() -> None:
    round_ = budget(Pool(320), page_size=16, chunked_prefill_size=96)
    assert round_.try_add(waiting(33, 10))
    assert (round_.rem_total, round_.cur_rem) == (320 - 48 - 10, 320 - 48)
    assert (round_.rem_input, round_.rem_chunk) == (1000 - 48, 96 - 48)


@pytest.mark.parametrize(
    ("page_size", "chunk", "first"),
    [(1, 64, 64), (1, 33, 33), (16, 64, 64), (16, 33, 32), (16, 7, 16), (4, 35, 32)],
)
def test_a_chunk_is_cut_to_whole_pages(page_size: int, chunk: int, first: int) -> None:
    req = waiting(100)
    round_ = budget(Pool(500), page_size=page_size, chunked_prefill_size=chunk)
    round_.try_add(req)
    assert (req.extend_input_len, req.fill_len) == (first, first)
    assert round_.taken == [req] and round_.chunked is req and not round_.out_of_kv


def test_a_first_chunk_starts_behind_the_cached_prefix() -> None:
    req = waiting(100, cached=32, node="head")
    budget(Pool(500, evictable=32), page_size=16, chunked_prefill_size=40).try_add(req)
    assert (req.prefix_len, req.extend_input_len, req.fill_len) == (32, 32, 64)


def test_a_middle_chunk_reserves_no_output() -> None:
    round_ = budget(Pool(500), chunked_prefill_size=64)
    round_.try_add(waiting(100, 20))
    assert round_.rem_total == 500 - 64


def test_only_one_prompt_is_cut_in_a_round() -> None:
    pool = Pool(1000, evictable=10)
    first, second = waiting(50), waiting(60, cached=10, node="head")
    round_ = budget(pool, chunked_prefill_size=64)
    assert round_.try_add(first)
    assert not round_.try_add(second) and not round_.out_of_kv
    assert round_.taken == [first, second] and round_.chunked is second
    assert (second.extend_input_len, second.fill_len) == (14, 24)
    assert pool.locks == {"head": 1}


def test_only_whole_prompts_join_after_a_cut_one() -> None:
    cut, small, large = waiting(100), waiting(8), waiting(9)
    round_ = budget(Pool(1000), page_size=16, chunked_prefill_size=40)
    assert round_.try_add(cut)  # two pages; 8 tokens of the chunk are left
    assert not round_.try_add(large) and not round_.out_of_kv
    assert not round_.try_add(small) and not round_.out_of_kv
    assert round_.taken == [cut, small] and round_.chunked is cut and not round_.out_of_kv
    assert large.extend_input_len == 9


def test_less_than_a_page_of_chunk_admits_no_request() -> None:
    round_ = budget(Pool(1000), page_size=16, chunked_prefill_size=40)
    assert round_.try_add(waiting(30))  # two pages; 8 tokens of the chunk are left
    other = waiting(100)
    assert not round_.try_add(other) and not round_.out_of_kv
    assert len(round_.taken) == 1 and other.extend_input_len == 100


def test_first_prompt_may_exceed_the_input_limit_of_a_round() -> None:
    round_ = budget(Pool(10_000), max_prefill_tokens=100)
    assert round_.try_add(waiting(40))
    assert not round_.try_add(waiting(60)) and not round_.out_of_kv
    assert round_.try_add(waiting(59))
    alone = budget(Pool(10_000), max_prefill_tokens=100)
    assert not alone.try_add(waiting(300)) and not alone.out_of_kv
    assert len(alone.taken) == 1


def test_mixed_decodes_reserve_their_tokens_and_pages() -> None:
    """Ten decodes take ten tokens of every limit, and three of them a new page of sixteen tokens."""
    limits = {"page_size": 16, "mixed_decode_tokens": 10, "mixed_reserve_tokens": 48}
    round_ = budget(Pool(320), growth=20.0, chunked_prefill_size=64, **limits)
    assert (round_.rem_total, round_.cur_rem) == (320 - 48 - 20, 320 - 48)
    assert (round_.rem_input, round_.rem_chunk) == (990, 54)
    req = waiting(100)
    round_.try_add(req)
    assert req.extend_input_len == 48


def test_many_mixed_decodes_leave_one_page_of_the_chunk() -> None:
    round_ = budget(Pool(1000), page_size=16, chunked_prefill_size=32, mixed_decode_tokens=40)
    assert round_.rem_chunk == 16


class TestContinuing:
    """The prompt under way holds KV already, so growth that other requests may need later does not stop it."""

    @pytest.mark.parametrize("growth", [0.0, 499.0])
    def test_it_takes_what_is_free_now(self, growth: float) -> None:
        req = waiting(200, cached=64)
        round_ = budget(Pool(500), growth=growth, chunked_prefill_size=64)
        round_.continue_chunked(req)
        assert (req.prefix_len, req.extend_input_len) == (64, 64)
        assert round_.taken == [req] and round_.chunked is req and not round_.out_of_kv

    def test_it_leaves_a_page_free(self) -> None:
        req = waiting(200, cached=64)
        budget(Pool(64), page_size=16, chunked_prefill_size=64).continue_chunked(req)
        assert req.extend_input_len == 48

    def test_its_last_chunk_reserves_the_output(self) -> None:
        req = waiting(100, 20, cached=64)
        round_ = budget(Pool(500), chunked_prefill_size=64)
        round_.continue_chunked(req)
        assert round_.taken == [req] and round_.chunked is None and not round_.out_of_kv
        assert round_.rem_total == 500 - 36 - 20

    def test_without_room_it_stays_the_chunked_request(self) -> None:
        req = waiting(100, cached=64)
        round_ = budget(Pool(16), page_size=16, chunked_prefill_size=64)
        round_.continue_chunked(req)
        assert not round_.taken and round_.chunked is req and round_.out_of_kv
        assert (req.extend_input_len, req.fill_len) == (36, 100)

    def test_it_leaves_the_decodes_their_pages(self) -> None:
        req = waiting(200, cached=64)
        round_ = budget(Pool(96), page_size=16, chunked_prefill_size=64, mixed_reserve_tokens=48)
        round_.continue_chunked(req)
        assert req.extend_input_len == 32  # 96 - 48 for the decodes - a page


def test_running_requests_are_expected_to_use_a_share_of_their_limits() -> None:
    first, second, third = waiting(10, 100), waiting(10, 50), waiting(10, 1_000_000)
    first.output_ids.extend(range(40))
    assert future_growth([first, second], 0.5) == 0.5 * (60 + 50)
    assert future_growth([third], 0.5) == 0.5 * CLIP_MAX_NEW_TOKENS
    assert future_growth([], 0.7) == 0
