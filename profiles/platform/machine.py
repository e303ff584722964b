"""What a run needs of a machine: a device, a clock, an observer that watches it, and labels for its numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeVar

import numpy as np

from ...sched.observe import Clock, Observer
from ..record.provenance import HardwarePart, Labels
from ..record.result import HazardFinding, OrderingRow
from ..record.timeline import Names, Site

if TYPE_CHECKING:
    import torch

    from ...sched.config import Capabilities

T = TypeVar("T")


class MachineError(RuntimeError):
    """This machine cannot do what was requested."""


class HostTime:
    """How the time of the scheduler's own code gets onto the machine's clock. Here the clock includes it already: it is
    real, or advanced by a profile's costs."""

    def running(self) -> AbstractContextManager[None]:
        """Inside it, the scheduler's loop runs."""
        return nullcontext()

    def excluded(self, part: T) -> T:
        """An observer, clock or source of the tool's, wrapped so that calls to it take no host time."""
        return part


class StorageAccess(NamedTuple):
    """The bytes [starts[k], ends[k]) of a storage that a kernel touches; the intervals are sorted and apart."""

    storage: torch.UntypedStorage
    starts: np.ndarray[Any, np.dtype[np.int64]]
    ends: np.ndarray[Any, np.dtype[np.int64]]
    write: bool


class VisitingKernel(Protocol):
    """A kernel whose accesses are found by computing it."""

    @property
    def name(self) -> str: ...

    def storages(self) -> Iterable[torch.UntypedStorage]:
        """All memory that it may touch."""

    def accesses(self) -> Iterable[StorageAccess]:
        """What it touched when it was computed last."""


class Watcher:
    """Receives what happens to device and pinned memory, and ignores it. Subclasses follow memory: the hazard checker,
    and the adversary's re-use of freed blocks.

    ``spent`` is the time in ns of this process that watching has taken so far. ``device_works``: what happens to pinned
    memory at present is the device's work, though this process computes it. ``sites`` and ``streams`` are the source
    lines and the stream names by number that reports refer to.
    """

    _NOTHING: ClassVar[AbstractContextManager[None]] = nullcontext()

    spent = 0
    device_works = False

    def listening(self) -> AbstractContextManager[None]:
        """Surrounds everything that happens on the virtual GPU."""
        return self._NOTHING

    def made(self, tensor: torch.Tensor) -> None:
        """``tensor`` is new memory, or a view, and nothing was launched."""

    def moved(self, tensor: torch.Tensor, block: Any, size: int) -> None:
        """The memory of ``tensor`` has grown: ``size`` bytes of its former ``block`` are copied to new memory."""

    def host_access(self, op: str, tensor: torch.Tensor, *, write: bool) -> None:
        """The host itself reads or writes pinned memory."""

    def sent(self, tensor: torch.Tensor) -> None:
        """A link reads the values on the current stream."""

    def generated(self, op: str, tensor: torch.Tensor) -> None:
        """``op`` launched a kernel that writes new memory."""

    def name(self, tensor: torch.Tensor, name: str) -> None:
        """Name the tensor's memory in all later reports, and report it if it is written and never read."""

    def record_stream(self, tensor: torch.Tensor, queue: int) -> None:
        """Once freed, the tensor's memory is not re-issued before that stream has done its present work."""

    def capturing(self, capture: object | None) -> None:
        """Operations become nodes of that graph from now on; with None they are executed again."""

    def marked(self) -> None:
        """The graph under capture records an event here, whenever it is launched."""

    def replaying(self, capture: object) -> AbstractContextManager[None]:  # noqa: ARG002
        """Surrounds the computation of a graph that is launched."""
        return self._NOTHING

    def visiting(
        self,
        kernel: VisitingKernel,  # noqa: ARG002
        arguments: Sequence[torch.Tensor],  # noqa: ARG002
    ) -> AbstractContextManager[None]:
        """The kernel is computed and launched inside, with these arguments in device memory and in pinned memory."""
        return self._NOTHING

    def fused(self, op: str, results: Sequence[torch.Tensor]) -> AbstractContextManager[None]:  # noqa: ARG002
        """Everything that is launched inside is one operation, whose ``results`` are complete when the block ends."""
        return self._NOTHING

    def places(self) -> tuple[OrderingRow, ...]:
        """The source lines that ordered accesses, if their need is probed."""
        return ()

    def found(self, sites: Sequence[Site], streams: Mapping[int, str]) -> tuple[HazardFinding, ...]:  # noqa: ARG002
        """Accesses that nothing orders."""
        return ()

    def unread(self, sites: Sequence[Site], streams: Mapping[int, str]) -> tuple[HazardFinding, ...]:  # noqa: ARG002
        """Named memory that was written and never read."""
        return ()


@dataclass(slots=True)
class Counting:
    """The outcome of a traced pass: why its counts are void, if they are, and how many records could not be placed."""

    abstained: str | None = None
    notes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Machine:
    """``flush`` delivers the records that are still held back. ``peek`` reads a
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
    flush: Callable[[], None]
    peek: Callable[[torch.Tensor], torch.Tensor]
    environment: dict[str, Any]
    traced: Callable[[], AbstractContextManager[Counting]] | None = None
    host: HostTime = field(default_factory=HostTime)
    hazards: Watcher | None = None
    untimed: str = ""
    unwatched: Callable[[], AbstractContextManager[None]] = nullcontext
