"""The scheduler's ranges as NVTX ranges: domain ``schedbench``, one category each for schedule, forward and copy.

Without a tool attached NVIDIA's library hands back a dummy domain, and this listener is not installed at all. nvtx
0.2.11, the last one that asks no tool whether it listens, is what Nsight Systems 2023 hears; its domains have no verbs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace, TracebackType
from typing import Any

import nvtx

from ...sched.observe import RANGES, Silence, StepInfo

DOMAIN = "schedbench"
INJECTED = "NVTX_INJECTION64_PATH"
MEASURE = "measure"  # range around the measured workload, which a tool may begin and end with


def listening() -> bool:
    """Whether a tool takes NVTX ranges from this process; an nvtx that cannot know is told by the tool's variable."""
    found = nvtx.get_domain(DOMAIN)
    return type(found).__name__ != "DummyDomain" and (_has_verbs(found) or INJECTED in os.environ)


@contextmanager
def measuring() -> Iterator[None]:
    """Around the measured workload."""
    if not listening():
        yield
        return
    domain = _domain()
    domain.push_range(domain.get_event_attributes(message=MEASURE))
    try:
        yield
    finally:
        domain.pop_range()


def _domain() -> Any:
    found = nvtx.get_domain(DOMAIN)
    return found if _has_verbs(found) else _Functions()


def _has_verbs(domain: object) -> bool:
    return hasattr(domain, "push_range")


class _Functions:
    """nvtx's plain functions, in the shape of a domain."""

    def get_event_attributes(self, **attributes: Any) -> SimpleNamespace:
        return SimpleNamespace(domain=DOMAIN, **attributes)

    def push_range(self, attributes: SimpleNamespace) -> None:
        nvtx.push_range(**vars(attributes))

    def pop_range(self) -> None:
        nvtx.pop_range(domain=DOMAIN)

    def mark(self, attributes: SimpleNamespace) -> None:
        nvtx.mark(**vars(attributes))


class NvtxRanges(Silence):
    """Pushes ranges under stable names with the step as payload; marks name each step's kind and size when it is
    launched, and its kind when it is settled."""

    def __init__(self) -> None:
        self._domain = _domain()
        self._attributes: dict[str, Any] = {}

    def range(self, name: str, step: int, size: int) -> AbstractContextManager[object]:  # noqa: ARG002
        return _Pushed(self._domain.push_range, self._domain.pop_range, self._event(name, step))

    def launched(self, info: StepInfo) -> None:
        message = f"{info.kind} bs={info.batch_size}"
        self._domain.mark(self._domain.get_event_attributes(message=message, payload=info.step))

    def settled(self, info: StepInfo) -> None:
        message = f"settled {info.kind}{' steady' if info.steady else ''}"
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
