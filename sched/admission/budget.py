"""The budget of one admission round (upstream ``PrefillAdder``).

Each round has a budget of its own, which shrinks as requests are taken; the requests taken are the plan. Of the cache a
budget changes only the lock of a taken request's prefix, because the lock turns evictable tokens into protected ones
and so changes the budget itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from ..config import CLIP_MAX_NEW_TOKENS, EngineConfig, SpeculativeConfig
from ..hisparse.tier import KVTier
from ..memory.cache import PrefixCache
from ..request import Request


class AdmissionVerdict(Enum):
    CONTINUE = "the next request may be tried"
    NO_TOKEN = "KV is short"
    FULL = "this round's token budget is spent"


class Limits(NamedTuple):
    """Token limits of one round."""

    page_size: int
    max_prefill_tokens: int
    chunked_prefill_size: int | None
    mixed_decode_tokens: int  # decodes that are mixed into the step and count against this round
    mixed_reserve_tokens: int  # KV that those decodes need: whole pages


class PrefillPlan(NamedTuple):
    requests: tuple[Request, ...]  # in batch order; their extend_input_len and fill_len are set
    chunked: Request | None  # the request whose prompt continues in a later round
    out_of_kv: bool


@dataclass(slots=True)
class PrefillBudget:
    """``rem_total`` accounts for what running requests are expected to need, ``cur_rem`` for this step only."""

    limits: Limits
    tree: PrefixCache
    room: KVTier
    future_tokens: float  # expected growth of the running requests
    taken: list[Request] = field(default_factory=list)
    chunked: Request | None = None
    out_of_kv: bool = False
    rem_input: int = 0
    rem_chunk: int | None = None
    _total_offset: float = 0.0
    _current_offset: int = 0
    _claimed: int = 0

    def __post_init__(self) -> None:
        limits = self.limits
        self.rem_input = limits.max_prefill_tokens - limits.mixed_decode_tokens
        if limits.chunked_prefill_size is not None:
            rem = limits.chunked_prefill_size - limits.mixed_decode_tokens
            self.rem_chunk = max(rem, limits.page_size)  # a round with many decodes still makes progress
        self._total_offset = limits.mixed_reserve_tokens + self.future_tokens
        self._current_offset = limits.mixed_reserve_tokens

    @property
    def _capacity(self) -> int:
        return self.room.available_size() + self.tree.evictable_size()

    @property
    def rem_total(self) -> float:
        return self._capacity - self._total_offset

    @property
    def cur_rem(self) -> int:
        return self._capacity - self._current_offset

    def plan(self) -> PrefillPlan:
        return PrefillPlan(tuple(self.taken), self.chunked, self.out_of_kv)

    def continue_chunked(self, req: Request) -> None:
        """Take the next chunk of the request whose prompt has been computed in part. The request holds KV, so its chunk
        is limited by what is free now and not by what others may need later; if nothing is free it waits a round."""
        room = self._floor_page(self.cur_rem - self.limits.page_size)
        wanted = req.extend_input_len
        tokens = min(wanted, room, wanted if self.rem_chunk is None else self._chunk(wanted))
        if tokens <= 0:
            self.out_of_kv = True
            self.chunked = req
            return
        self._cut(req, tokens)
        self._take(req, tokens, 0 if tokens < wanted else _remaining(req))
        self.chunked = req if tokens < wanted else None

    def try_add(self, req: Request) -> AdmissionVerdict:
        """Take ``req``, completely or as a first chunk, if the budget allows. Its prefix has been matched."""
        needed = req.extend_input_len + _remaining(req) + self.limits.page_size
        if needed >= self.rem_total or self.room.claim(req) > self.room.unclaimed_size() - self._claimed:
            return self._no_kv()
        if self.taken and self._ceil_page(req.extend_input_len) >= self.rem_input:
            return AdmissionVerdict.FULL
        self.tree.inc_lock_ref(req.last_node)
        if needed >= self.rem_total:  # its own prefix was counted as evictable until the lock
            self.tree.dec_lock_ref(req.last_node)
            return self._no_kv()
        if not self._add_locked(req):
            self.tree.dec_lock_ref(req.last_node)
            return AdmissionVerdict.FULL
        return self._state()

    def _add_locked(self, req: Request) -> bool:
        wanted = req.extend_input_len
        tokens = wanted if self.rem_chunk is None else self._chunk(wanted)
        if tokens <= 0 or (tokens < wanted and self.chunked is not None):
            return False
        if tokens < wanted:
            self._cut(req, tokens)
            self.chunked = req
        self._take(req, tokens, 0 if tokens < wanted else _remaining(req))
        return True

    def _chunk(self, wanted: int) -> int:
        """How many of the ``wanted`` tokens fit this round's chunk: all, or whole pages."""
        assert self.rem_chunk is not None
        return wanted if wanted <= self.rem_chunk else self._floor_page(self.rem_chunk)

    def _cut(self, req: Request, tokens: int) -> None:
        req.fill_len = req.prefix_len + tokens
        req.extend_input_len = tokens

    def _take(self, req: Request, tokens: int, max_new: int) -> None:
        paged = self._ceil_page(tokens)
        self.taken.append(req)
        self._claimed += self.room.claim(req)
        self._total_offset += paged + max_new
        self._current_offset += paged
        self.rem_input -= paged
        if self.rem_chunk is not None:
            self.rem_chunk -= paged

    def _state(self) -> AdmissionVerdict:
        if self.rem_total <= 0 or self.cur_rem <= 0:
            return self._no_kv()
        if self.rem_input <= 0 or (self.rem_chunk is not None and self.rem_chunk <= 0):
            return AdmissionVerdict.FULL
        return AdmissionVerdict.CONTINUE

    def _no_kv(self) -> AdmissionVerdict:
        self.out_of_kv = True
        return AdmissionVerdict.NO_TOKEN

    def _ceil_page(self, tokens: int) -> int:
        return -(-tokens // self.limits.page_size) * self.limits.page_size

    def _floor_page(self, tokens: int) -> int:
        return tokens // self.limits.page_size * self.limits.page_size


def init_next_round_input(req: Request, cache: PrefixCache) -> int:
    """Match the prefix of a waiting request and set what is to be computed of it: at least one token, and all whose
    log probabilities are missing. Returns the length of the match (upstream ``init_next_round_input``)."""
    longest = req.seqlen - 1
    if req.sampling.prompt_logprobs:  # those of a token follow from the token before it
        longest = min(longest, len(req.prompt_logprobs))
    match = cache.match_prefix(req.tokens(0, longest))
    req.prefix_indices = match.device_indices
    req.last_node = match.last_node
    req.cache_protected_len = match.matched
    req.fill_len = req.seqlen
    req.extend_input_len = req.fill_len - match.matched
    return match.matched


def init_next_chunk(req: Request) -> None:
    """Set what is to be computed of a prompt that has been computed in part: everything behind its earlier chunks."""
    assert req.prefix_indices is not None
    req.fill_len = req.seqlen
    req.extend_input_len = req.fill_len - req.prefix_indices.shape[0]


def future_growth(running: Sequence[Request], new_token_ratio: float) -> float:
    """Tokens that running requests are expected to add: the ratio of what their limits would allow."""
    return new_token_ratio * sum(_remaining(req) for req in running)


def _remaining(req: Request) -> int:
    return min(req.sampling.max_new_tokens - len(req.output_ids), CLIP_MAX_NEW_TOKENS)


def next_step_tokens(reqs: Sequence[Request], config: EngineConfig) -> int:
    """Tokens in whole pages: for one token of each request, or for the slots that a speculative step allocates."""
    page, spec = config.page_size, config.speculative
    if spec is None:  # all that is allocated is committed
        return len(reqs) if page == 1 else page * sum(req.kv_committed_len % page == 0 for req in reqs)
    ends = [_end(req, spec) for req in reqs]
    held = [req.kv_allocated_len for req in reqs]
    return page * sum(-(-end // page) - -(-start // page) for start, end in zip(held, ends, strict=True))


def _end(req: Request, spec: SpeculativeConfig) -> int:
    if spec.mode == "v1":
        return req.kv_committed_len + spec.alloc_len
    return allocation_end(req, spec)


def allocation_end(req: Request, spec: SpeculativeConfig) -> int:
    """The position up to which the overlapped worker allocates slots: two steps, because the host's committed length
    lags one verify behind."""
    return max(req.kv_allocated_len, req.kv_committed_len + 2 * spec.alloc_len)
