"""The same run with other times for one source line.

Values are computed as without the change, so the program makes the same calls. The order that the times follow from
need not be correct: without a line's wait, a stream may use memory too early.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec

from ..record.timeline import NO_SITE
from .engine import EventRecording, StreamQueue
from .runtime import Direction, Runtime

P = ParamSpec("P")
LineChange = Literal["no wait", "pinned", "absent", "longer"]


class Counterfactual(NamedTuple):
    """What is changed of the copies, syncs and launches that a source line makes.

    ``no wait``: the host does not wait for the device; ``pinned``: copies between host and device are from or to pinned
    memory, which is allocated for each, and the host does not wait for them; ``absent``: they take no time of the host
    or the device; ``longer``: the host takes ``extra`` ns longer, once in each step in which the line runs.
    """

    file: str
    line: int
    change: LineChange
    extra: int = 0


Method = Callable[Concatenate[Any, P], None]


def _unless_absent(method: Method[P]) -> Method[P]:
    """The method, which does nothing where the call is left out."""

    def call(runtime: CounterfactualRuntime, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if not runtime.is_left_out():
            method(runtime, *args, **kwargs)

    return call


class CounterfactualRuntime(Runtime):
    """The device's API with the changed times."""

    def __init__(self, changed: Counterfactual, *inputs: Any) -> None:
        super().__init__(*inputs)
        self._changed = changed
        self._at_line: dict[int, bool] = {NO_SITE: False}
        self._last_step: int | None = None

    kernel = _unless_absent(Runtime.kernel)
    copy_within = _unless_absent(Runtime.copy_within)
    synchronize = _unless_absent(Runtime.synchronize)
    synchronize_event = _unless_absent(Runtime.synchronize_event)
    wait_event = _unless_absent(Runtime.wait_event)
    wait_peer_event = _unless_absent(Runtime.wait_peer_event)

    def copy(self, direction: Direction, size: int, *, pinned: bool, blocking: bool) -> bool:
        if self.is_left_out():
            return False
        if self._has("pinned"):
            if not pinned:
                self.pin(size, copied=direction == "h2d")
            pinned, blocking = True, False
        return super().copy(direction, size, pinned=pinned, blocking=blocking)

    def synchronize_device(self) -> None:
        if not self.is_left_out() and not self._has("no wait"):
            super().synchronize_device()

    def query(self, stream: StreamQueue, recording: EventRecording | None = None) -> bool:
        return self.is_left_out() or self._has("no wait") or super().query(stream, recording)

    def pin(self, size: int, *, copied: bool) -> None:
        if not self._has("absent"):
            super().pin(size, copied=copied)

    def _wait(self, recording: EventRecording) -> int:
        return 0 if self._has("no wait") else super()._wait(recording)

    def is_left_out(self) -> bool:
        """Whether the present call is left out. A line that takes longer does so here, before its first call of a
        step."""
        _, step, _ = self.context
        if self._has("longer") and step != self._last_step:
            self._last_step = step
            self.now += self._changed.extra
        return self._has("absent")

    def _has(self, change: LineChange) -> bool:
        """Whether the present call is made by the line, and the line has this change."""
        if self._changed.change != change or self.capture is not None:
            return False
        site = self.sites.here()
        at_line = self._at_line.get(site)
        if at_line is None:
            found = self.sites.resolved()[site]
            at_line = (found.file, found.line) == (self._changed.file, self._changed.line)
            self._at_line[site] = at_line
        return at_line
