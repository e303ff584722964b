"""The budget of one admission round (upstream ``PrefillAdder``).

Each round has a budget of its own, which shrinks as requests are taken; the requests taken are the plan. Of the cache a
budget changes only the lock of a taken request's prefix, because the lock turns evictable tokens into protected ones
and so changes the budget itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..config import CLIP_MAX_NEW_TOKENS, EngineConfig, SpeculativeConfig
from ..hisparse.tier import KVTier
from ..memory.cache import PrefixCache
from ..request import Request


class Limits(NamedTuple):
    """Token limits of one round."""

    page_size: int
    max_prefill_tokens: int
    chunked_prefill_size: int | None
    mixed_decode_tokens: int  # decodes that are mixed into the step and count against this round
    mixed_reserve_tokens: int  # KV that those decodes need: whole pages


class PrefillBudget:
    """``rem_total`` accounts for what running requests are expected to need, ``cur_rem`` for this step only."""

    def __init__(self, limits: Limits, tree: PrefixCache, room: KVTier, future_tokens: float) -> None:
        """``future_tokens`` is the expected growth of the running requests."""
        self.taken: list[Request] = []  # in batch order; their extend_input_len and fill_len are set
        self.chunked: Request | None = None  # the request whose prompt continues in a later round
        self.out_of_kv = False
        self.rem_input = limits.max_prefill_tokens - limits.mixed_decode_tokens
        self.rem_chunk: int | None = None
        if limits.chunked_prefill_size is not None:
            rem = limits.chunked_prefill_size - limits.mixed_decode_tokens
            self.rem_chunk = max(rem, limits.page_size)  # a round with many decodes still makes progress
        self._page, self._tree, self._room = limits.page_size, tree, room
        self._total_offset = limits.mixed_reserve_tokens + future_tokens
        self._current_offset = limits.mixed_reserve_tokens
        self._claimed = 0

    @property
    def _capacity(self) -> int:
        return self._room.available_size() + self._tree.evictable_size()

    @property
    def rem_total(self) -> float:
        return self._capacity - self._total_offset

    @property
    def cur_rem(self) -> int:
        return self._capacity - self._current_offset

    def continue_chunked(self, req: Request) -> None:
        """Take the next chunk of the request whose prompt has been computed in part: of everything behind its earlier
        chunks. The request holds KV, so its chunk is limited by what is free now and not by what others may need later;
        if nothing is free it waits a round."""
        assert req.prefix_indices is not None
        req.fill_len = req.seqlen
        req.extend_input_len = req.fill_len - req.prefix_indices.shape[0]
        room = self._floor_page(self.cur_rem - self._page)
        tokens = min(room, self._chunk(req.extend_input_len))
        if tokens > 0:
            self._take(req, tokens)
        else:
            self.out_of_kv = True
            self.chunked = req

    def try_add(self, req: Request) -> bool:
        """Take ``req``, completely or as a first chunk, if the budget allows. Its prefix has been matched. Returns
        whether the next request may be tried; otherwise KV is short, or this round's token budget is spent."""
        needed = req.extend_input_len + _remaining(req) + self._page
        if needed >= self.rem_total or self._room.claim(req) > self._room.unclaimed_size() - self._claimed:
            self.out_of_kv = True
            return False
        if self.taken and self._ceil_page(req.extend_input_len) >= self.rem_input:
            return False
        self._tree.inc_lock_ref(req.last_node)
        if needed >= self.rem_total:  # its own prefix was counted as evictable until the lock
            self._tree.dec_lock_ref(req.last_node)
            self.out_of_kv = True
            return False
        tokens = self._chunk(req.extend_input_len)
        if tokens <= 0 or (tokens < req.extend_input_len and self.chunked is not None):
            self._tree.dec_lock_ref(req.last_node)
            return False
        self._take(req, tokens)
        self.out_of_kv = self.rem_total <= 0 or self.cur_rem <= 0
        is_spent = self.rem_input <= 0 or (self.rem_chunk is not None and self.rem_chunk <= 0)
        return not (self.out_of_kv or is_spent)

    def _chunk(self, wanted: int) -> int:
        """How many of the ``wanted`` tokens fit this round's chunk: all, or whole pages."""
        if self.rem_chunk is None or wanted <= self.rem_chunk:
            return wanted
        return self._floor_page(self.rem_chunk)

    def _take(self, req: Request, tokens: int) -> None:
        """Take the next ``tokens`` of a prompt; one that is cut reserves no output."""
        max_new = _remaining(req)
        if tokens < req.extend_input_len:
            req.fill_len, req.extend_input_len = req.prefix_len + tokens, tokens
            self.chunked, max_new = req, 0
        paged = self._ceil_page(tokens)
        self.taken.append(req)
        self._claimed += self._room.claim(req)
        self._total_offset += paged + max_new
        self._current_offset += paged
        self.rem_input -= paged
        if self.rem_chunk is not None:
            self.rem_chunk -= paged

    def _ceil_page(self, tokens: int) -> int:
        return -(-tokens // self._page) * self._page

    def _floor_page(self, tokens: int) -> int:
        return tokens // self._page * self._page


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
    return page * sum(
        -(-allocation_end(req, spec) // page) - -(-req.kv_allocated_len // page) for req in reqs
    )


def allocation_end(req: Request, spec: SpeculativeConfig) -> int:
    """The position up to which a speculative worker allocates slots. The overlapped one does so for two steps, because
    the host's committed length lags one verify behind."""
    if spec.mode == "v1":
        return req.kv_committed_len + spec.alloc_len
    return max(req.kv_allocated_len, req.kv_committed_len + 2 * spec.alloc_len)
