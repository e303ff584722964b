"""The two kinds of passes.

timed   two events per step, and the clock around calls that may wait: throughput, latency, stalls, occupancy.
traced  Kineto, and the source line of every call: counts. The host is slower, so no times are kept.

What the scheduler reports to its observer goes into the log of the current window. An event that is recorded on an idle
stream completes at once. So the first event is recorded when the step's first forward range opens, directly before its
first kernel, and not where the step begins.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

from ... import sched
from ...sched.observe import Clock, Observer, StepInfo
from ..platform.machine import Counting
from ..record.timeline import NO_SITE, Op, Range, Sink, Site, Window
from ..vgpu.ledger import LedgerContext
from ..vgpu.sites import Sites
from .calls import BlockingCalls, CallSites
from .join import Joined
from .kineto import KinetoRow
from .log import Log, StreamTable, WallClock

# Ranges that end a step's forward. Of several, the latest counts.
LAST_RANGES = frozenset(("publish", "draft"))


class LoggedRange:
    """A range of the scheduler, logged when it closes. A forward range of a timed pass has ``spans``: a step's first
    one begins its span, and one of ``LAST_RANGES`` ends it."""

    __slots__ = ("_clock", "_context", "_enclosing", "_log", "_size", "_spans", "_start")

    def __init__(
        self, log: Log, clock: Clock, context: LedgerContext, size: int, spans: StepSpans | None
    ) -> None:
        self._log, self._clock, self._context, self._size = log, clock, context, size
        self._spans = spans

    def __enter__(self) -> None:
        contexts = self._log.contexts
        self._enclosing = contexts.current
        self._start = now = self._clock.now()
        contexts.change(now, self._context)
        if self._spans is not None:
            self._spans.open(self._context.step)

    def __exit__(self, *raised: object) -> None:
        name, step, _ = self._context
        if self._spans is not None and name in LAST_RANGES:
            self._spans.close(step)
        now = self._clock.now()
        self._log.contexts.change(now, self._context.after(self._enclosing))
        self._log.ranges.append(Range(name, step, self._size, self._start, now))


BATCH = 128  # events are read each time that so many steps have settled
BEHIND = 2  # a step's events have completed when this many later steps have settled


class TimingEvent(Protocol):
    def record(self) -> None:
        """Record on the current stream."""

    def elapsed_time(self, end: TimingEvent) -> float:
        """Milliseconds until ``end``; both events have completed."""


@dataclass(slots=True)
class _Step:
    """``span``: start and end in ns of the device since the first anchor, once the events were read."""

    step: int
    start: TimingEvent
    launched: int
    stream: int
    end: TimingEvent | None = None
    span: tuple[int, int] = (0, 0)


@dataclass(slots=True)
class StepSpans:
    """The spans of one pass, which ``anchor`` begins. ``event`` makes a timing event, ``stream`` returns the number of
    the current stream."""

    event: Callable[[], TimingEvent]
    stream: Callable[[], int]
    synchronize: Callable[[], None]
    clock: Clock
    _steps: dict[int, _Step] = field(default_factory=dict)
    _read_steps: list[_Step] = field(default_factory=list)
    _idle: list[TimingEvent] = field(default_factory=list)
    _anchors: list[tuple[int, int]] = field(default_factory=list)  # (host, device), ns
    _last: TimingEvent | None = None
    _last_at: int = 0
    _settled: int = 0

    def anchor(self) -> None:
        """Read both clocks at one instant, as precisely as a sync returns."""
        self.synchronize()
        event = self._recorded()
        self.synchronize()
        host = self.clock.now()
        self._anchors.append((host, self._time(event)))

    def open(self, step: int) -> None:
        if step not in self._steps:
            start = self._recorded()
            self._steps[step] = _Step(step, start, self.clock.now(), self.stream())

    def close(self, step: int) -> None:
        """End the step's span. The last call counts, because sampling may have been delayed."""
        if step in self._steps:
            self._steps[step].end = self._recorded()

    def settled(self, step: int) -> None:
        self._settled += 1
        if self._settled % BATCH == 0:
            self._read(step - BEHIND)

    def ops(self) -> list[Op]:
        """All spans on the host's clock, after a second ``anchor``."""
        self._read(max(self._steps, default=-1))
        return [self._op(step) for step in self._read_steps]

    def _recorded(self) -> TimingEvent:
        event = self._idle.pop() if self._idle else self.event()
        event.record()
        return event

    def _read(self, newest: int) -> None:
        for step in sorted(step for step in self._steps if step <= newest):
            held = self._steps.pop(step)
            if held.end is not None:
                held.span = self._time(held.start), self._time(held.end)
                self._read_steps.append(held)

    def _time(self, event: TimingEvent) -> int:
        """ns since the first event, summed from event to event: elapsed_time is a float32 of milliseconds."""
        if self._last is not None:
            self._last_at += round(self._last.elapsed_time(event) * 1e6)
            self._idle.append(self._last)
        self._last = event
        return self._last_at

    def _op(self, step: _Step) -> Op:
        start, end = map(self._host, step.span)
        start = max(start, step.launched)
        return Op(
            kind="kernel",
            name="forward",
            stream=step.stream,
            start=start,
            end=max(end, start),
            bytes=0,
            host_bytes=0,
            host_memory="",
            blocking=False,
            range="model",
            forward=True,
            step=step.step,
            site=NO_SITE,
            launched=step.launched,
        )

    def _host(self, device: int) -> int:
        """The host's instant. Between the anchors the drift of the clocks, parts per million, is taken to be even."""
        (host0, device0), (host1, device1) = self._anchors[0], self._anchors[-1]
        if device1 == device0:
            return host0 + device - device0
        return host0 + (device - device0) * (host1 - host0) // (device1 - device0)


class KinetoRecorder(Protocol):
    """A window of Kineto; a test has one of its own."""

    def start(self) -> None: ...

    def stop(self) -> list[KinetoRow]: ...


@dataclass(frozen=True, slots=True)
class DeviceHandle:
    """What a watch needs of torch.cuda, so that a test can replace it."""

    module: Any  # torch.cuda or a module like it
    type: str
    handle: Callable[[Any], int]  # of a stream
    recorder: Callable[[], KinetoRecorder]
    identify: Callable[[StreamTable], frozenset[int]]  # see machine.identify


def this_thread() -> frozenset[int]:
    """Numbers under which Kineto may list calls of this thread: the kernel's thread id, or the low word of the C
    library's, signed or unsigned."""
    low = threading.get_ident() & 0xFFFFFFFF
    return frozenset({threading.get_native_id(), low, low - (1 << 32), (1 << 32) - low})


class Watch(Observer):
    """Watches one machine, and logs the ranges and steps of the current pass; passes are timed unless they run inside
    ``traced``. Also resolves the names of its records: source lines are those of sched/."""

    def __init__(self, device: DeviceHandle, sink: Sink, *, inline: int) -> None:
        self.device = device
        self.clock = WallClock()
        self.sink = sink
        self.lines = Sites([Path(folder) for folder in sched.__path__])
        self.inline = inline
        self.threads: frozenset[int] = frozenset()
        self.table = StreamTable()
        self.synchronize = device.module.synchronize  # the original: own syncs are not timed as stalls
        self.waits = BlockingCalls(self.clock, Log(), device.type, self.number)
        self._period: _Timed | _Traced = _Timed(self)
        self._replaced = ExitStack()

    @property
    def sites(self) -> Sequence[Site]:
        return self.lines.resolved()

    @property
    def streams(self) -> dict[int, str]:
        return self.table.names

    def begin(self, spans: StepSpans | None) -> Log:
        """Log a new pass from now on, with its forward spans if it is timed."""
        self.log, self.spans = Log(), spans
        return self.log

    def range(self, name: str, step: int, size: int) -> AbstractContextManager[object]:
        context = self.log.contexts.current.inside(name, step)
        return LoggedRange(self.log, self.clock, context, size, self.spans if context.forward else None)

    def stream(self, name: str, stream: Any) -> None:
        self.table.announce(name, self.device.handle(stream))

    def launched(self, info: StepInfo) -> None:
        self.log.launched.append(info)

    def settled(self, info: StepInfo) -> None:
        self.log.settled.append(info)
        if self.spans is not None:
            self.spans.settled(info.step)

    @contextmanager
    def installed(self) -> Iterator[Self]:
        """Time calls that may wait in this block."""
        with self._replaced:
            self._install()
            yield self

    @contextmanager
    def uninstalled(self) -> Iterator[None]:
        """Inside ``installed``, restore torch's own calls in this block."""
        self._replaced.close()
        try:
            yield
        finally:
            self._install()

    def _install(self) -> None:
        self._replaced.enter_context(self.waits.installed(self.device.module))

    @contextmanager
    def traced(self) -> Iterator[Counting]:
        """Trace the periods of this block. What follows the last flush in it is lost."""
        counting = Counting()
        self.threads = this_thread() | self.device.identify(self.table)
        self._period.drop()
        self._period = _Traced(self, counting)
        try:
            yield counting
        finally:
            self._period.drop()
            self._period = _Timed(self)

    def flush(self) -> None:
        """Wait for the device, deliver the current period, and begin another of the same kind."""
        end = self.clock.now()
        self.synchronize()
        period = self._period
        period.deliver(end)
        self._period = _Traced(self, period.counting) if isinstance(period, _Traced) else _Timed(self)

    def number(self, stream: Any = None) -> int:
        """The number of a stream, or of the current one for None."""
        stream = self.device.module.current_stream() if stream is None else stream
        return self.table.by_handle(self.device.handle(stream))


class _Timed:
    """The part of a timed pass from one flush to the next."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        event = partial(watch.device.module.Event, enable_timing=True)
        self._spans = StepSpans(event, watch.number, watch.synchronize, watch.clock)
        self._log = watch.waits.begin(watch.begin(self._spans))
        self._start = watch.clock.now()
        self._spans.anchor()

    def deliver(self, end: int) -> None:  # noqa: ARG002 - all that has ended belongs to it
        """Feed the sink. ``end`` is when the flush was asked for; the device is idle now."""
        self._spans.anchor()
        log, watch = self._log, self._watch
        watch.sink.feed(
            Window(
                self._start,
                watch.clock.now(),
                ranges=log.ranges,
                ops=self._spans.ops(),
                calls=watch.waits.calls,
                launched=log.launched,
                settled=log.settled,
            )
        )

    def drop(self) -> None:
        """Discard the period."""


class _Traced:
    """The part of a traced pass from one flush to the next; its methods are those of ``_Timed``."""

    def __init__(self, watch: Watch, counting: Counting) -> None:
        self.counting = counting
        self._watch = watch
        self._log = watch.begin(spans=None)
        self._recorder = watch.device.recorder()
        self._recorder.start()
        self._start = watch.clock.now()
        self._sites = ExitStack()
        calls = CallSites(self._log, watch.clock, watch.lines, watch.number)
        self._sites.enter_context(calls.installed(watch.device.module))

    def deliver(self, end: int) -> None:
        self._sites.close()
        rows = self._recorder.stop()
        watch = self._watch
        source = self._log, watch.table, watch.threads, watch.clock.epoch, watch.inline
        joined = Joined(rows, *source, start=self._start, end=end)
        if joined.abstained is not None:
            self.counting.abstained = joined.abstained
        elif self._log.launched:
            self.counting.notes = joined.notes
            watch.sink.feed(joined.window)

    def drop(self) -> None:
        self._sites.close()
        self._recorder.stop()
