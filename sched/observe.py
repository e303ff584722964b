"""The observer that a scheduler reports to, and the clock that it reads.

A run passes one ``Observer`` to its scheduler. NVTX ranges, the log of requests, the model of host times and the
metrics are observers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    from .request import Request

Category = Literal["schedule", "forward", "copy"]
StreamName = Literal["schedule", "forward", "copy", "lengths", "staging", "backup", "transfer"]
# In the order in which reports show them.
StepKind = Literal["prefill", "mixed", "decode", "draft", "verify", "draft_extend", "prebuilt", "idle"]

_RANGES: Mapping[Category, tuple[str, ...]] = {
    "schedule": ("receive", "admit", "prepare", "settle", "lengths", "flatten", "flatten_numpy"),
    "forward": ("resolve", "model", "draft", "verify", "draft_extend", "sample", "publish"),
    "copy": ("copy",),
}
RANGES: Mapping[str, Category] = {name: category for category, names in _RANGES.items() for name in names}
"""Names of ranges and their categories. A relay policy may open ranges of other names."""


SLEEP = "sleep"  # the range in which the scheduler has nothing to do
NO_STEP = -1  # the step of a range that belongs to no batch


class StepInfo(NamedTuple):
    """One step: announced when it is launched and, with the final value of ``steady``, when it is settled."""

    step: int
    kind: StepKind
    batch_size: int
    num_tokens: int  # input tokens of the forward
    steady: bool  # nothing finished, joined or was penalised in this step


class Observer:
    """Receives what a scheduler does; the methods of this base class do nothing. All methods are called on the
    scheduler's thread."""

    range_names: Collection[str] | None = None
    """The names of the ranges that this observer is asked for; None: all."""

    _no_range = nullcontext()

    def range(self, name: str, step: int, size: int) -> AbstractContextManager[object]:  # noqa: ARG002
        """A named piece of work for ``step``; ``size`` is the n of the phase's cost a + b*n (requests, or tokens where
        prompts are flattened)."""
        return self._no_range

    def stream(self, name: StreamName, stream: torch.Stream) -> None:
        """``stream`` is called ``name`` from now on."""

    def planned(self, step: int, kind: StepKind) -> None:
        """A batch is about to be prepared as ``step``. A prefill that becomes mixed is announced again."""

    def launched(self, info: StepInfo) -> None:
        """The forward of a step has been enqueued."""

    def settled(self, info: StepInfo) -> None:
        """The result of a step has been read and applied to its requests."""

    def tokens(self, requests: Sequence[Request], count: int) -> None:
        """``count`` new tokens of each request have been read on the host. A request that is aborted now ends with
        them; under speculation v1 with its next verify, whose draft has begun."""

    def verified(self, request: Request, accepted: int) -> None:
        """A verify step has accepted ``accepted`` tokens of ``request``, the bonus included. If the request ends among
        them, fewer are kept."""

    def ending(self, request: Request) -> None:
        """``request`` has its last token; its KV has not been released yet."""

    def ended(self, request: Request) -> None:
        """``request`` has reached a terminal status."""

    def retracted(self, request: Request) -> None:
        """The KV of ``request`` has been released; the request waits again."""

    def kv_usage(self, used_tokens: int) -> None:
        """KV tokens in use (not free, not evictable) after a step was prepared."""


class Clock(Protocol):
    """Time as the scheduler sees it: integer nanoseconds from the start of the run."""

    def now(self) -> int: ...

    def sleep_until(self, at: int) -> None: ...


class LogicalClock:
    """A clock that moves only in ``sleep_until``; for tests and runs without time."""

    def __init__(self) -> None:
        self._now = 0

    def now(self) -> int:
        return self._now

    def sleep_until(self, at: int) -> None:
        self._now = max(self._now, at)
