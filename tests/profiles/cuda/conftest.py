"""Synthetic Chrome traces in Kineto's form, and synthetic logs of ranges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from schedbench.profiles.cuda.join import Joined
from schedbench.profiles.cuda.kineto import rows
from schedbench.profiles.cuda.log import NO_CALL, NO_CONTEXT, CallRecord, Log, StreamTable
from schedbench.profiles.record.timeline import Range
from schedbench.sched.observe import StepInfo


class Trace:
    """Rows in microseconds from ``BASE``; correlations count up."""

    BASE = 1_700_000_000_000_000_000  # ns since 1970
    MAIN, OTHER = 4242, 99  # threads

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
        ]
        self._correlation = 100

    def call(self, name: str, start: float, end: float, *, cat: str = "cuda_runtime", tid: int = 4242) -> int:
        self._correlation += 1
        self._add(cat, name, start, end, tid, {"cbid": 7, "correlation": self._correlation})
        return self._correlation

    def kernel(self, correlation: int, start: float, end: float, *, stream: int = 7, name: str = "k") -> None:
        self._add("kernel", name, start, end, stream, {"stream": stream, "correlation": correlation})

    def replayed(self, correlation: int, start: float, end: float, *, stream: int, node: int) -> None:
        self.kernel(correlation, start, end, stream=stream, name=f"gemm {node}")

    def memcpy(
        self, correlation: int, what: str, start: float, end: float, *, size: int, stream: int = 7
    ) -> None:
        more = {"stream": stream, "correlation": correlation, "bytes": size, "memory bandwidth (GB/s)": 1.5}
        self._add("gpu_memcpy", f"Memcpy {what}", start, end, stream, more)

    def copy(self, what: str, at: float, *, size: int, stream: int = 7, blocking: bool = False) -> None:
        """A copy by torch: one call, followed by a stream sync if it blocks."""
        correlation = self.call("cudaMemcpyAsync", at, at + 1)
        self.memcpy(correlation, what, at + 1.5, at + 2.5, size=size, stream=stream)
        if blocking:
            self.synchronize(at + 1.1, at + 12, stream=stream)

    def launch(self, at: float, *, stream: int = 7, duration: float = 3) -> int:
        correlation = self.call("cudaLaunchKernel", at, at + 1)
        self.kernel(correlation, at + 2, at + 2 + duration, stream=stream)
        return correlation

    def synchronize(self, start: float, end: float, *, stream: int) -> None:
        correlation = self.call("cudaStreamSynchronize", start, end)
        more = {"cuda_sync_kind": "Stream Sync", "stream": stream, "correlation": correlation}
        self._add("cuda_sync", "Stream Sync", start, end, stream, more)

    def wait_event(self, at: float, *, stream: int, source: int, record: int) -> None:
        correlation = self.call("cudaStreamWaitEvent", at, at + 0.5)
        more = {
            "cuda_sync_kind": "Stream Wait Event",
            "stream": stream,
            "correlation": correlation,
            "wait_on_stream": source,
            "wait_on_cuda_event_record_corr_id": record,
        }
        self._add("cuda_sync", "Stream Wait Event", at, at + 0.5, stream, more)

    def event_sync(self, start: float, end: float, *, source: int) -> None:
        correlation = self.call("cudaEventSynchronize", start, end)
        more = {
            "cuda_sync_kind": "Event Sync",
            "stream": -1,
            "correlation": correlation,
            "wait_on_stream": source,
        }
        self._add("cuda_sync", "Event Sync", start, end, -1, more)

    def named(self, name: str, start: float, end: float) -> None:
        """A range of record_function on the main thread."""
        self._add("user_annotation", name, start, end, self.MAIN, {})

    def annotation(self, name: str, start: float, end: float, *, stream: int = 7) -> None:
        self._add("gpu_user_annotation", name, start, end, stream, {"stream": stream})

    def document(self) -> dict[str, Any]:
        return {"schemaVersion": 1, "baseTimeNanoseconds": self.BASE, "traceEvents": self.events}

    def _add(self, cat: str, name: str, start: float, end: float, tid: int, args: dict[str, Any]) -> None:
        event = {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": tid, "ts": start, "args": args}
        self.events.append({**event, "dur": round(end - start, 3)})


class ManualClock:
    """A clock that a test sets, in ns."""

    def __init__(self) -> None:
        self.at = 0

    def now(self) -> int:
        return self.at

    def sleep_until(self, at: int) -> None:
        self.at = max(self.at, at)


class DrawnLog(Log):
    """A log with times in microseconds. Ranges are drawn in order and do not nest; nor do calls."""

    def draw(self, name: str, step: int, start: float, end: float) -> None:
        begin, stop = round(start * 1000), round(end * 1000)
        self.contexts.change(begin, NO_CONTEXT.inside(name, step))
        self.contexts.change(stop, NO_CONTEXT)
        self.ranges.append(Range(name, step, 1, begin, stop))

    def calling(self, site: int, start: float, end: float, *, stream: int = -1) -> None:
        self.calls.change(round(start * 1000), CallRecord(site, round(start * 1000), stream))
        self.calls.change(round(end * 1000), NO_CALL)

    def step(self, step: int, kind: str = "decode") -> None:
        info = StepInfo(step, kind, 4, 4, True)
        self.launched.append(info)
        self.settled.append(info)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def trace() -> Trace:
    return Trace()


@pytest.fixture
def log() -> DrawnLog:
    return DrawnLog()


@pytest.fixture
def streams() -> StreamTable:
    """The schedule stream is CUPTI's 7, the forward stream its 13."""
    table = StreamTable()
    for name, cupti, handle in (("schedule", 7, 0x70), ("forward", 13, 0x130)):
        table.announce(name, handle)
        table.identify(cupti, handle)
    return table


@pytest.fixture
def joined(trace: Trace, log: DrawnLog, streams: StreamTable) -> Callable[[], Joined]:
    def joining() -> Joined:
        source = log, streams, frozenset({Trace.MAIN}), Trace.BASE, 65536
        return Joined(rows(trace.document()), *source, start=0, end=10**9)

    return joining
