"""What of a request's prompt is still to be computed, as a round of admission begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..memory.cache import PrefixCache
    from ..request import Request


def begin_round(req: Request, cache: PrefixCache) -> int:
    """Match the prefix of a waiting request; at least one token is always computed. Returns the match."""
    match = cache.match_prefix(req.tokens(0, req.seqlen - 1))
    req.prefix_indices = match.device_indices
    req.last_node = match.last_node
    req.cache_protected_len = match.matched
    req.fill_len = req.seqlen
    req.extend_input_len = req.fill_len - match.matched
    return match.matched


def continue_round(req: Request) -> None:
    """All that is behind the chunks of it that have been computed."""
    assert req.prefix_indices is not None
    req.fill_len = req.seqlen
    req.extend_input_len = req.fill_len - req.prefix_indices.shape[0]
