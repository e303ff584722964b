"""Which requests are refused when they arrive, and the order in which waiting ones are considered (upstream
``SchedulePolicy``)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from ..config import EngineConfig, Policy
from ..model.grammar import GrammarError
from ..request import Request

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
    if prompt + output + beyond + config.page_size >= pool:
        return f"{what} exceed the KV pool of {pool} tokens"
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
