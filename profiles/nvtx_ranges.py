"""The scheduler's ranges as NVTX ranges: domain ``schedbench``, one category each for schedule, forward and copy.

Without a tool attached NVIDIA's library hands back a dummy domain, and this listener is not installed at all.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import nvtx

from ..sched.observe import RANGES, Silence, StepInfo

DOMAIN = "schedbench"


def listening() -> bool:
    """Whether a tool takes NVTX ranges from this process."""
    return type(nvtx.get_domain(DOMAIN)).__name__ != "DummyDomain"


class NvtxRanges(Silence):
    """Pushes ranges under stable names with the step as payload; a mark names each launched step's kind and size."""

    def __init__(self) -> None:
        self._domain: Any = nvtx.get_domain(DOMAIN)
        self._attributes: dict[str, Any] = {}

    def range(self, name: str, step: int, size: int) -> AbstractContextManager[object]:  # noqa: ARG002
        return _Pushed(self._domain.push_range, self._domain.pop_range, self._event(name, step))

    def launched(self, info: StepInfo) -> None:
        message = f"{info.kind} bs={info.batch_size}"
        self._domain.mark(self._domain.get_event_attributes(message=message, payload=info.step))

    def _event(self, name: str, step: int) -> Any:
        attributes = self._attributes.get(name)
        if attributes is None:
            category = RANGES.get(name, "schedule")
            attributes = self._domain.get_event_attributes(message=name, category=category, payload=step)
            self._attributes[name] = attributes
        attributes.payload = step
        return attributes


class _Pushed:
    __slots__ = ("_attributes", "_pop", "_push")

    def __init__(self, push: Callable[[Any], object], pop: Callable[[], object], attributes: Any) -> None:
        self._push, self._pop, self._attributes = push, pop, attributes

    def __enter__(self) -> None:
        self._push(self._attributes)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pop()
