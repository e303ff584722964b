"""What the scheduler announces, and the clock it is given. Silence costs one lookup.

The scheduler never asks who listens. Whoever composes a run passes an ``Observer``:
NVTX ranges, the run's log, the host-time model and the metrics are all listeners.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    from .request import Request

Category = Literal["schedule", "forward", "copy"]
# In the order in which reports show them.
StepKind = Literal["prefill", "mixed", "decode", "draft", "verify", "draft_extend", "prebuilt", "idle"]

# Range names and their category. A relay policy may open a range of its own name.
RANGES: dict[str, Category] = {
    "receive": "schedule",
    "admit": "schedule",
    "prepare": "schedule",
    "settle": "schedule",
    "lengths": "schedule",
    "flatten": "schedule",
    "flatten_numpy": "schedule",
    "resolve": "forward",
    "model": "forward",
    "draft": "forward",
    "verify": "forward",
    "draft_extend": "forward",
    "sample": "forward",
    "publish": "forward",
    "copy": "copy",
}


SLEEP = "sleep"  # range that is open while the scheduler has nothing to do
NO_STEP = -1  # of a range whose work is for no batch in particular


class StepInfo(NamedTuple):
    """One forward batch: announced when launched and, completed, when its result is settled."""

    step: int
    kind: StepKind
    batch_size: int
    num_tokens: int  # input tokens of the forward
    steady: bool  # nothing finished, joined or was penalised in this step


class Observer(Protocol):
    """Listener for what a scheduler does. All methods are called on the scheduler's thread."""

    def range(self, name: str, step: int, size: int) -> AbstractContextManager[object]:
        """A named piece of work for ``step``; ``size`` is the n of the phase's cost a + b*n
        (requests, or tokens where prompts are flattened)."""

    def stream(self, name: str, stream: torch.Stream) -> None:
        """``stream`` is known as ``name`` (schedule, forward, copy, staging, backup) from now on."""

    def planned(self, step: int, kind: StepKind) -> None:
        """A batch is about to be prepared as ``step``; a prefill may yet become mixed, which is told again."""

    def launched(self, info: StepInfo) -> None: ...

    def settled(self, info: StepInfo) -> None: ...

    def tokens(self, request: Request, count: int) -> None:
        """``count`` new tokens of ``request`` have just become known to the host."""

    def verified(self, request: Request, accepted: int) -> None:
        """A verify step has given ``request`` ``accepted`` tokens, the bonus included; an ending may cut them."""

    def ending(self, request: Request) -> None:
        """``request`` has its last token; its KV has not been released yet."""

    def ended(self, request: Request) -> None:
        """``request`` reached a terminal status."""

    def retracted(self, request: Request) -> None: ...

    def kv_usage(self, used_tokens: int) -> None:
        """KV tokens in use (not free, not evictable) after a step was prepared."""


class Silence:
    """The observer of a run that nobody watches."""

    _nothing = nullcontext()

    def range(self, name: str, step: int, size: int) -> AbstractContextManager[object]:  # noqa: ARG002
        return self._nothing

    def stream(self, name: str, stream: torch.Stream) -> None: ...

    def planned(self, step: int, kind: StepKind) -> None: ...

    def launched(self, info: StepInfo) -> None: ...

    def settled(self, info: StepInfo) -> None: ...

    def tokens(self, request: Request, count: int) -> None: ...

    def verified(self, request: Request, accepted: int) -> None: ...

    def ending(self, request: Request) -> None: ...

    def ended(self, request: Request) -> None: ...

    def retracted(self, request: Request) -> None: ...

    def kv_usage(self, used_tokens: int) -> None: ...


class Clock(Protocol):
    """Time as the scheduler sees it: integer nanoseconds from the start of the run."""

    def now(self) -> int: ...

    def sleep_until(self, at: int) -> None: ...


class LogicalClock:
    """A clock that only moves when someone sleeps; for tests and pure bookkeeping."""

    def __init__(self) -> None:
        self._now = 0

    def now(self) -> int:
        return self._now

    def sleep_until(self, at: int) -> None:
        self._now = max(self._now, at)
