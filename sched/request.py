"""The host-side state of one request: tokens, KV accounting, and its end; and where requests come from.

Times are integer nanoseconds of the injected clock.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from .config import SamplingParams

if TYPE_CHECKING:
    import torch


class Status(Enum):
    """Terminal and non-terminal states; every request reaches exactly one terminal state."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    REFUSED = "refused"
    ABORTED = "aborted"
    FAILED = "failed"
    CANCELLED = "cancelled"

    def __init__(self, name: str) -> None:
        self.terminal = name not in ("waiting", "running")


@dataclass(slots=True, eq=False)
class Request:
    """Field names are upstream's (SGLang ``Req``); lengths not listed are derived from these.

    The token positions of a request, and the counts that bound them::

        0 ......... kv_committed_len ... kv_allocated_len
        |-- origin_input_ids --|-- output_ids --|
                    KV is written up to committed; slots are owned up to allocated.
                    The last sampled token's KV is not computed yet.
    """

    id: str
    origin_input_ids: array[int]  # array('q')
    sampling: SamplingParams
    arrival: int  # ns
    index: int = 0  # place in the workload; keys sampling noise with the seed

    output_ids: array[int] = field(default_factory=lambda: array("q"))
    # by position, of tokens that were computed for this request, where sampling.hidden_states
    hidden_states: dict[int, Sequence[float]] = field(default_factory=dict)
    # of tokens 1, 2, ... of the prompt, where sampling.prompt_logprobs
    prompt_logprobs: list[float] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)  # of output_ids, where sampling.logprobs
    encoder_len: int = 0  # of origin_input_ids, how many at the front are an encoder's input
    embedding: tuple[float, ...] = ()  # of the prompt, where prompts are embedded
    status: Status = Status.WAITING
    reason: str = ""  # why it ended: length, stop, abort, or an error message

    # device rows and cache
    req_pool_idx: int | None = None
    prefix_indices: torch.Tensor | None = None  # [prefix_len] int64, KV slots that need no computing
    last_node: Any = None  # the radix node that is locked for this request
    cache_protected_len: int = 0  # prefix owned by the tree, not by this request
    kv_committed_len: int = 0
    kv_allocated_len: int = 0

    # one round of scheduling
    fill_len: int = 0  # tokens after this round: origin + output, cut by chunking
    extend_input_len: int = 0
    inflight_middle_chunks: int = 0
    retraction_count: int = 0
    verify_ct: int = 0  # verifies whose tokens are on the host
    to_finish: str = ""  # a deferred abort's reason
    grammar: Any = None
    # From its prefill worker, what its draft starts from; again after an offload, where it guesses badly.
    draft: tuple[torch.Tensor, ...] = ()
    # Of its tokens, only those from the may_end_at-th on and those in stops can end it (loop/settle.py).
    may_end_at: int = 0
    stops: tuple[int, ...] = ()

    # instants, ns
    first_scheduled_at: int | None = None
    first_token_at: int | None = None
    prefilled_at: int | None = None  # by a prefill worker, where there is one
    transferred_at: int | None = None  # the end of the KV transfer from there
    finished_at: int | None = None
    cached_tokens: int = 0  # prompt tokens served from the prefix cache at first admission

    @property
    def seqlen(self) -> int:
        return len(self.origin_input_ids) + len(self.output_ids)

    @property
    def prefix_len(self) -> int:
        return self.fill_len - self.extend_input_len

    @property
    def row(self) -> int:
        """``req_pool_idx`` of a request that holds a row."""
        assert self.req_pool_idx is not None, f"request {self.id} holds no row"
        return self.req_pool_idx

    @property
    def finished(self) -> bool:
        return self.status.terminal

    def end_with_next_token(self, reason: str) -> None:
        self.to_finish = reason
        self.may_end_at = 0

    def tokens(self, start: int, stop: int) -> array[int]:
        """Token ids at positions [start, stop) of prompt followed by output."""
        n = len(self.origin_input_ids)
        if stop <= n:
            return self.origin_input_ids[start:stop]
        if start >= n:
            return self.output_ids[start - n : stop - n]
        return self.origin_input_ids[start:] + self.output_ids[: stop - n]


class RequestSource(Protocol):
    """Hands out requests as they arrive. Instants are nanoseconds of the engine's clock."""

    def due(self, now: int) -> Sequence[Request]:
        """Requests that have arrived by ``now`` and were not handed out yet, in order of arrival."""

    def next_at(self) -> int | None:
        """When the next request arrives; None while that depends on others ending, or when there is none."""

    def ended(self, request: Request, now: int) -> None:
        """Note that ``request`` has ended at ``now``; a closed-loop workload sends the next one."""
