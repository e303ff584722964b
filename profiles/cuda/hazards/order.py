"""The order of operations, from the calls of streams, events and graphs.

A graph keeps the order inside its capture: a wait inside a capture orders nothing outside it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ...vgpu.hazards.clocks import Clock, VectorClocks
from ...vgpu.patching import Function, Target, replaced
from ...vgpu.sites import LastSite


class Current(NamedTuple):
    id: int


class ProgramOrder:
    """The vector clocks of a program on a device module, and small numbers for its streams."""

    def __init__(self, module: Any, watch: Sequence[Path]) -> None:
        self.clocks = VectorClocks()
        self.sites = LastSite(watch)
        self.streams: dict[int, str] = {}  # names by number
        self.capturing = False
        self._module = module
        self._numbers: dict[int, int] = {}
        # An event and its clock, by the event's id.
        self._events: dict[int, tuple[weakref.ref[Any], Clock]] = {}

    @property
    def stream(self) -> Current:
        return Current(self.number(self._module.current_stream()))

    def number(self, stream: Any) -> int:
        return self._numbers.setdefault(int(stream.stream_id), len(self._numbers))

    def waited(self) -> None:
        """The host has waited for all operations of the current stream."""
        self._synchronized(self.stream.id)

    def waited_for_all(self) -> None:
        self.clocks.synchronize_all()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Follow the calls of streams and events in this block."""
        with replaced(list(self._targets()), self._wrap):
            yield

    def _targets(self) -> Iterator[Target]:
        module = self._module
        for name in ("record", "wait", "query", "synchronize"):
            yield Target(module.Event, name, f"event {name}")
        yield Target(module.Stream, "query", "stream query")
        yield Target(module.Stream, "synchronize", "stream synchronize")
        yield Target(module, "synchronize", "device synchronize")
        yield Target(module.graph, "__enter__", "capture")  # torch's waits for the device first

    def _wrap(self, target: Target, function: Function) -> Function:
        update: Callable[[Sequence[Any], Any], None] = {
            "event record": lambda args, _: self._recorded(*args),
            "event wait": lambda args, _: self._awaited(*args),
            "event query": lambda args, done: self._reached(args[0]) if done else None,
            "event synchronize": lambda args, _: self._reached(args[0]),
            "stream query": lambda args, done: self._synchronized(self.number(args[0])) if done else None,
            "stream synchronize": lambda args, _: self._synchronized(self.number(args[0])),
            "device synchronize": lambda *_: self.waited_for_all(),
            "capture": lambda *_: self.waited_for_all(),
        }[target.call]

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            update((*args, *kwargs.values()), result)
            return result

        return wrapped

    def _recorded(self, event: Any, stream: Any = None) -> None:
        known = self.clocks.recorded(self._actor(stream))
        self._events[id(event)] = weakref.ref(event), known

    def _awaited(self, event: Any, stream: Any = None) -> None:
        if not self.capturing:
            self.clocks.wait(self._actor(stream), self._known(event))

    def _reached(self, event: Any) -> None:
        self.clocks.synchronize(self._known(event))

    def _synchronized(self, stream: int) -> None:
        self.clocks.synchronize(self.clocks.recorded(stream + 1))

    def _known(self, event: Any) -> Clock:
        """A copy of the event's clock; empty for an event that was never recorded."""
        owner, known = self._events.get(id(event), (None, []))
        return [*known] if owner is not None and owner() is event else []

    def _actor(self, stream: Any) -> int:
        return (self.stream.id if stream is None else self.number(stream)) + 1
