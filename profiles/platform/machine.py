"""What a run needs of the machine under it: a device, a clock, somebody who watches, and honest labels."""

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
    """How the time that the scheduler's own code takes gets onto the machine's clock."""

    def running(self) -> AbstractContextManager[None]:
        """Around the scheduler's loop."""

    def excluded(self, part: T) -> T:
        """A listener, clock or source of the tool's, such that calls to it take no time of the host's."""


class ByItself:
    """The clock needs no help: it is a real one, or is moved by what a profile declares."""

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
    """What came of a traced pass: why its counts do not count, if so, and what could not be placed."""

    abstained: str | None = None
    notes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Machine:
    """``exact``: times repeat byte for byte. ``flush`` delivers what the watcher still holds. ``peek`` reads a device
    tensor without the device knowing: for checks that are no part of the run. ``traced``, where counting perturbs
    times, makes the pass inside it one that counts; None where one pass does both. ``hazards`` where they are watched
    for. ``untimed``: why its times mean nothing and it counts nothing, if so. ``unwatched``: nothing of torch's is
    replaced for the watcher's sake inside it."""

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
    host: HostTime = field(default_factory=ByItself)
    hazards: HazardWatcher | None = None
    untimed: str = ""
    unwatched: Callable[[], AbstractContextManager[None]] = nullcontext
