"""The scheduler's ranges as NVTX ranges: domain ``schedbench``, with the categories schedule, forward and copy.

Without a tool attached, nvtx returns a dummy domain, and no observer is installed. Nsight Systems 2023 receives ranges
of nvtx up to 0.2.11 only: later versions ask the tool whether it is attached, which it does not answer. The domains of
0.2.11 have no methods to push and pop ranges; ``_DomainFunctions`` stands in for them. NVIDIA has no nvtx for macOS,
where no tool could receive ranges.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Self

from ...sched.observe import RANGES, Observer, StepInfo

try:
    import nvtx
except ImportError:
    nvtx = None

DOMAIN = "schedbench"
INJECTED = "NVTX_INJECTION64_PATH"
MEASURE = "measure"  # range of the measured workload; a tool can start and stop its capture with it


def listening() -> bool:
    """Whether a tool receives NVTX ranges of this process. For nvtx 0.2.11, the tool's environment variable decides."""
    if nvtx is None:
        return False
    found = nvtx.get_domain(DOMAIN)
    return type(found).__name__ != "DummyDomain" and (_has_methods(found) or INJECTED in os.environ)


@contextmanager
def measuring() -> Iterator[None]:
    """Push the range of the measured workload for this block, if a tool is attached."""
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
    return found if _has_methods(found) else _DomainFunctions()


def _has_methods(domain: object) -> bool:
    return hasattr(domain, "push_range")


class _DomainFunctions:
    """A domain made of nvtx's module functions."""

    def get_event_attributes(self, **attributes: Any) -> SimpleNamespace:
        return SimpleNamespace(domain=DOMAIN, **attributes)

    def push_range(self, attributes: SimpleNamespace) -> None:
        nvtx.push_range(**vars(attributes))

    def pop_range(self) -> None:
        nvtx.pop_range(domain=DOMAIN)

    def mark(self, attributes: SimpleNamespace) -> None:
        nvtx.mark(**vars(attributes))


class NvtxRanges(Observer):
    """Pushes a range for each of the scheduler's, with the step as payload, and makes a mark with the step's kind and
    size when it is launched, and with its kind when it is settled. It is the context manager of its ranges, too: what
    is entered is the range that was asked for last."""

    def __init__(self) -> None:
        self._domain = _domain()
        self._attributes: dict[str, Any] = {}

    def range(self, name: str, step: int, size: int) -> Self:  # noqa: ARG002
        attributes = self._attributes.get(name)
        if attributes is None:
            category = RANGES.get(name, "schedule")
            attributes = self._domain.get_event_attributes(message=name, category=category, payload=step)
            self._attributes[name] = attributes
        attributes.payload = step
        self._asked = attributes
        return self

    def __enter__(self) -> None:
        self._domain.push_range(self._asked)

    def __exit__(self, *raised: object) -> None:
        self._domain.pop_range()

    def launched(self, info: StepInfo) -> None:
        message = f"{info.kind} bs={info.batch_size}"
        self._domain.mark(self._domain.get_event_attributes(message=message, payload=info.step))

    def settled(self, info: StepInfo) -> None:
        message = f"settled {info.kind}{' steady' if info.steady else ''}"
        self._domain.mark(self._domain.get_event_attributes(message=message, payload=info.step))
