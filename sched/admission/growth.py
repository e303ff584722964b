"""How much KV the running requests need for their next step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..config import EngineConfig, SpeculativeConfig
    from ..request import Request


def next_step_tokens(reqs: Sequence[Request], config: EngineConfig) -> int:
    """Tokens in whole pages: for one token of each request, or for the slots that a speculative step allocates."""
    page, spec = config.page_size, config.speculative
    ends = [_end(req, spec) for req in reqs]
    held = [req.kv_allocated_len for req in reqs]
    return page * sum(-(-end // page) - -(-start // page) for start, end in zip(held, ends, strict=True))


def _end(req: Request, spec: SpeculativeConfig | None) -> int:
    if spec is None:
        return req.kv_committed_len + 1
    if spec.mode == "v1":
        return req.kv_committed_len + spec.alloc_len
    return allocation_end(req, spec)


def allocation_end(req: Request, spec: SpeculativeConfig) -> int:
    """The position up to which the overlapped worker allocates slots: two steps, because the host's committed length
    lags one verify behind."""
    return max(req.kv_allocated_len, req.kv_committed_len + 2 * spec.alloc_len)
