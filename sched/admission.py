"""Admission: which requests are refused when they arrive, the order in which waiting ones are considered (upstream
``SchedulePolicy``), and the budget of one round (upstream ``PrefillAdder``).

Each round has a budget of its own, which shrinks as requests are taken; the requests taken are the plan. Of the cache a
budget changes only the lock of a taken request's prefix, because the lock turns evictable tokens into protected ones
and so changes the budget itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .config import CLIP_MAX_NEW_TOKENS, EngineConfig, Policy, SpeculativeConfig
from .memory.cache import PrefixCache
from .memory.tier import KVTier
from .model.grammar import GrammarError
from .request import Request

# Matching every waiting prompt costs time; with more prompts than this upstream falls back to fcfs.
LPM_FALLBACK_WAITING = 128
# A prompt that shares this many tokens with an earlier one in the queue, and has at most this many in the tree, waits
# until the earlier one has filled the tree.
IN_BATCH_PREFIX_TOKENS = 32


class WaitingOrder:
    """Reorders a waiting queue in place, once per round."""

    def __init__(self, policy: Policy, *, seed: int, match: Callable[[Request], int] | None) -> None:
        """``match(request)`` sets the request's cached prefix and returns its length; None where there is no
        tree, which turns ``lpm`` into ``fcfs``."""
        self._random = random.Random(seed)
        self._match = match
        self._sort: Callable[[list[Request]], object] = {
            "fcfs": self._first_come,
            "lpm": self._longest_prefix,
            "lof": self._longest_output,
            "random": self._random.shuffle,
        }[policy]
        self._policy = policy

    def sort(self, waiting: list[Request]) -> bool:
        """Sort ``waiting`` in place. Returns whether that has matched every request's prefix."""
        return bool(self._sort(waiting))

    def examined(self, num_waiting: int, num_free: int) -> int:
        """How many waiting requests one round examines; the n of the admit phase's host cost."""
        examines_all = self._policy == "lpm" and num_waiting <= LPM_FALLBACK_WAITING
        return num_waiting if examines_all else min(num_waiting, num_free + 1)

    def _first_come(self, waiting: list[Request]) -> None:
        """Keeps the order of the queue: arrivals, with retracted requests where they were inserted."""

    def _longest_output(self, waiting: list[Request]) -> None:
        waiting.sort(key=lambda req: -req.sampling.max_new_tokens)

    def _longest_prefix(self, waiting: list[Request]) -> bool:
        if self._match is None or len(waiting) > LPM_FALLBACK_WAITING:
            return False
        matched = {req.id: self._match(req) for req in waiting}
        later = _repeated_heads(waiting, matched)
        waiting.sort(key=lambda req: (req.id in later, -matched[req.id]))
        return True


def _repeated_heads(waiting: list[Request], matched: dict[str, int]) -> set[str]:
    """Requests whose first tokens are not cached and will be once an earlier request of the queue has run."""
    heads: set[bytes] = set()
    later: set[str] = set()
    for req in waiting:
        if matched[req.id] > IN_BATCH_PREFIX_TOKENS or len(req.origin_input_ids) <= IN_BATCH_PREFIX_TOKENS:
            continue
        head = req.origin_input_ids[:IN_BATCH_PREFIX_TOKENS].tobytes()
        if head in heads:
            later.add(req.id)
        heads.add(head)
    return later


def refusal(req: Request, config: EngineConfig, pool: int) -> str:
    """Why ``req`` does not fit into the context, or into a KV pool of ``pool`` tokens; empty where it does."""
    prompt, output = len(req.origin_input_ids), req.sampling.max_new_tokens
    beyond, purpose = _beyond(prompt + output, config)
    what = f"{prompt} prompt + {output} new tokens" + (f" + {beyond} {purpose}" if beyond else "")
    if prompt == 0:
        return "empty prompt"
    if prompt + output + beyond > config.context_len:
        return f"{what} exceed the context length of {config.context_len}"
    if prompt + output + beyond > (most := pool - config.page_size - 1):
        return f"{what} exceed the {most} of the KV pool's {pool} tokens that one request may have"
    outside = [token for token in req.sampling.stop_token_ids if not 0 <= token < config.vocab_size]
    if outside:
        return f"stop token {outside[0]} is not in the vocabulary of {config.vocab_size}"
    return ""


def _beyond(tokens: int, config: EngineConfig) -> tuple[int, str]:
    """Positions behind a request's last token that may be written to, and for what."""
    if config.speculative is not None:
        return config.speculative.overhang, "for drafts"
    return (0, "") if config.blocks is None else (-tokens % config.blocks.size, "for its last block")


def start_grammar(req: Request, grammars: Any) -> str:
    """Compile the grammar of ``req``, if it has one. Returns why that failed; empty if it did not."""
    if req.sampling.grammar is None:
        return ""
    try:
        req.grammar = grammars.start(req.sampling.grammar)
    except GrammarError as error:
        return str(error)
    return ""


# ---- the budget of one round ---------------------------------------------------------------------------------


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
        self._available = room.available_size()  # nothing is allocated before the round ends
        self._total_offset = limits.mixed_reserve_tokens + future_tokens
        self._current_offset = limits.mixed_reserve_tokens
        self._claimed = 0

    @property
    def _capacity(self) -> int:
        return self._available + self._tree.evictable_size()

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
