"""What a run needs of a machine: a device, a clock, an observer that watches it, and labels for its numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from ...sched.config import Capabilities
from ...sched.observe import Clock, Observer
from ..record.hazards import FoundHazard
from ..record.result import HardwarePart, Labels
from ..record.timeline import Names, Site

T = TypeVar("T")


class MachineError(RuntimeError):
    """This machine cannot do what was asked."""


class HostTime(Protocol):
    """How the time of the scheduler's own code gets onto the machine's clock."""

    def running(self) -> AbstractContextManager[None]:
        """Inside it, the scheduler's loop runs."""

    def excluded(self, part: T) -> T:
        """An observer, clock or source of the tool's, wrapped so that calls to it take no host time."""


class ClockedHostTime:
    """The clock includes the host's time already: it is real, or advanced by a profile's costs."""

    def running(self) -> AbstractContextManager[None]:
        return nullcontext()

    def excluded(self, part: T) -> T:
        return part


class HazardWatcher(Protocol):
    """Follows every access to device and pinned memory and reports those that nothing orders.

    ``sites`` and ``streams`` are the source lines and the stream names by number that the reports refer to.
    """

    @property
    def spent(self) -> int:
        """Nanoseconds of this process's time that watching has taken so far."""

    def name(self, tensor: torch.Tensor, name: str) -> None:
        """Name the tensor's memory in all later reports, and report it if it is written and never read."""

    def found(self, sites: Sequence[Site], streams: Mapping[int, str]) -> tuple[FoundHazard, ...]:
        """Accesses that nothing orders."""

    def unread(self, sites: Sequence[Site], streams: Mapping[int, str]) -> tuple[FoundHazard, ...]:
        """Named memory that was written and never read."""


@dataclass(slots=True)
class Counting:
    """The outcome of a traced pass: why its counts are void, if they are, and how many records could not be placed."""

    abstained: str | None = None
    notes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Machine:
    """``exact``: times repeat byte for byte. ``flush`` delivers the records that are still held back. ``peek`` reads a
    device tensor without an operation on the device, for checks that are no part of the run. ``traced``: inside it a
    pass counts, on a machine where counting perturbs times; None where one pass both counts and times. ``hazards``:
    where they are watched for. ``untimed``: why times mean nothing and nothing is counted, if so. ``unwatched``: inside
    it no function of torch is replaced for watching."""

    device: torch.device
    capabilities: Capabilities
    clock: Clock
    observer: Observer
    names: Names
    labels: Labels
    hardware: HardwarePart
    exact: bool
    flush: Callable[[], None]
    peek: Callable[[torch.Tensor], torch.Tensor]
    environment: dict[str, Any]
    traced: Callable[[], AbstractContextManager[Counting]] | None = None
    host: HostTime = field(default_factory=ClockedHostTime)
    hazards: HazardWatcher | None = None
    untimed: str = ""
    unwatched: Callable[[], AbstractContextManager[None]] = nullcontext
