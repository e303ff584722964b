"""What watching needs of torch.cuda, named, so that a test can be without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from .kineto import KinetoRow
from .spans import TimingEvent
from .streams import StreamTable


class KinetoRecorder(Protocol):
    """A window of Kineto."""

    def start(self) -> None: ...

    def stop(self) -> list[KinetoRow]: ...


@dataclass(frozen=True, slots=True)
class DeviceHandle:
    """A device module and how to ask it."""

    module: Any  # torch.cuda or its like
    type: str
    synchronize: Callable[[], None]  # taken before calls that wait are replaced: ours are nobody's stall
    event: Callable[[], TimingEvent]
    handle: Callable[[Any], int]  # of a stream
    current: Callable[[], int]  # handle of the current stream
    recorder: Callable[[], KinetoRecorder]
    identify: Callable[[StreamTable], frozenset[int]]  # finds CUPTI's streams, returns numbers of this thread
    threads: Callable[[], frozenset[int]]
