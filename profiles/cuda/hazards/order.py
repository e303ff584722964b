"""What orders what, heard from the calls of streams, events and graphs themselves.

A capture has an order of its own, which a replay keeps: what is waited for inside one orders nothing outside.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ...vgpu.hazards.clocks import Clock, Clocks
from ...vgpu.hazards.memory import LastSite
from ..patching import Function, Target, replaced


class Current(NamedTuple):
    id: int


class ProgramOrder:
    """The clocks of a program on that device module, and its streams by small numbers."""

    def __init__(self, module: Any, watch: Sequence[Path]) -> None:
        self.clocks = Clocks()
        self.sites = LastSite(watch)
        self.streams: dict[int, str] = {}  # names by number
        self.capturing = False
        self._module = module
        self._numbers: dict[int, int] = {}
        self._events: dict[int, tuple[weakref.ref[Any], Clock]] = {}  # what each stands for, by its id

    @property
    def stream(self) -> Current:
        return Current(self.number(self._module.current_stream()))

    def number(self, stream: Any) -> int:
        return self._numbers.setdefault(int(stream.stream_id), len(self._numbers))

    def waited(self) -> None:
        """The host has waited for everything on the current stream."""
        self._synchronized(self.stream.id)

    def waited_for_all(self) -> None:
        self.clocks.synchronize_all()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Streams and events are heard in this block."""
        with replaced(list(self._targets()), self._heard):
            yield

    def _targets(self) -> Iterator[Target]:
        module = self._module
        for name in ("record", "wait", "query", "synchronize"):
            yield Target(module.Event, name, f"event {name}")
        yield Target(module.Stream, "query", "stream query")
        yield Target(module.Stream, "synchronize", "stream synchronize")
        yield Target(module, "synchronize", "device synchronize")
        yield Target(module.graph, "__enter__", "capture")  # torch's waits for the device first

    def _heard(self, target: Target, function: Function) -> Function:
        tell: Callable[[Sequence[Any], Any], None] = {
            "event record": lambda args, _: self._recorded(*args),
            "event wait": lambda args, _: self._held(*args),
            "event query": lambda args, done: self._reached(args[0]) if done else None,
            "event synchronize": lambda args, _: self._reached(args[0]),
            "stream query": lambda args, done: self._synchronized(self.number(args[0])) if done else None,
            "stream synchronize": lambda args, _: self._synchronized(self.number(args[0])),
            "device synchronize": lambda *_: self.waited_for_all(),
            "capture": lambda *_: self.waited_for_all(),
        }[target.call]

        def hearing(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            tell((*args, *kwargs.values()), result)
            return result

        return hearing

    def _recorded(self, event: Any, stream: Any = None) -> None:
        known = self.clocks.recorded(self._actor(stream))
        self._events[id(event)] = weakref.ref(event), known

    def _held(self, event: Any, stream: Any = None) -> None:
        if not self.capturing:
            self.clocks.wait(self._actor(stream), self._known(event))

    def _reached(self, event: Any) -> None:
        self.clocks.synchronize(self._known(event))

    def _synchronized(self, stream: int) -> None:
        self.clocks.synchronize(self.clocks.recorded(stream + 1))

    def _known(self, event: Any) -> Clock:
        """A copy; an event that was never recorded stands for nothing."""
        whose, known = self._events.get(id(event), (None, []))
        return [*known] if whose is not None and whose() is event else []

    def _actor(self, stream: Any) -> int:
        return (self.stream.id if stream is None else self.number(stream)) + 1
