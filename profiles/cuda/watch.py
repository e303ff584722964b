"""The two kinds of passes.

timed   two events per step, and the clock around calls that may wait: throughput, latency, stalls, occupancy.
traced  Kineto, and the source line of every call: counts. The host is slower, so no times are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from ..platform.machine import Counting
from ..record.timeline import Sink, Window
from ..vgpu.sites import Sites
from .blocking_calls import BlockingCalls
from .call_sites import CallSites
from .join import JoinInputs, join
from .kineto import KinetoRow
from .log import Log, StreamTable, WallClock
from .observer import CudaObserver, StepSpans, TimingEvent


class KinetoRecorder(Protocol):
    """A window of Kineto; a test has one of its own."""

    def start(self) -> None: ...

    def stop(self) -> list[KinetoRow]: ...


@dataclass(frozen=True, slots=True)
class DeviceHandle:
    """What a watch needs of torch.cuda, so that a test can replace it."""

    module: Any  # torch.cuda or a module like it
    type: str
    synchronize: Callable[[], None]  # the original function: the tool's own syncs are not timed as stalls
    event: Callable[[], TimingEvent]
    handle: Callable[[Any], int]  # of a stream
    current: Callable[[], int]  # handle of the current stream
    recorder: Callable[[], KinetoRecorder]
    identify: Callable[[StreamTable], frozenset[int]]  # see kineto_window.identify
    threads: Callable[[], frozenset[int]]


class Watch:
    """Watches one machine; passes are timed unless they run inside ``traced``."""

    def __init__(
        self, device: DeviceHandle, clock: WallClock, *, sink: Sink, sites: Sites, inline: int
    ) -> None:
        self.device = device
        self.clock = clock
        self.sink = sink
        self.sites = sites
        self.inline = inline
        self.threads: frozenset[int] = frozenset()
        self.streams = StreamTable()
        self.observer = CudaObserver(clock, self.streams, device.handle)
        self.waits = BlockingCalls(clock, Log(), device.type, self.current)
        self._period: _Timed | _Traced = _Timed(self)
        self._replaced = ExitStack()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Time calls that may wait in this block."""
        with self._replaced:
            self._install()
            yield

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
        self.threads = self.device.threads() | self.device.identify(self.streams)
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
        self.device.synchronize()
        period = self._period
        period.deliver(end)
        self._period = _Traced(self, period.counting) if isinstance(period, _Traced) else _Timed(self)

    def number(self, stream: Any) -> int:
        """The number of a stream, or of the current one for None."""
        return self.current() if stream is None else self.streams.by_handle(self.device.handle(stream))

    def current(self) -> int:
        return self.streams.by_handle(self.device.current())


class _Timed:
    """The part of a timed pass from one flush to the next."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._spans = StepSpans(watch.device.event, watch.current, watch.device.synchronize, watch.clock)
        self._log = watch.waits.begin(watch.observer.begin(self._spans))
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
        self._log = watch.observer.begin(spans=None)
        self._recorder = watch.device.recorder()
        self._recorder.start()
        self._start = watch.clock.now()
        self._sites = ExitStack()
        calls = CallSites(self._log, watch.clock, watch.sites, watch.number)
        self._sites.enter_context(calls.installed(watch.device.module))

    def deliver(self, end: int) -> None:
        self._sites.close()
        rows = self._recorder.stop()
        watch = self._watch
        source = JoinInputs(self._log, watch.streams, watch.threads, watch.clock.epoch, watch.inline)
        joined = join(rows, source, start=self._start, end=end)
        if joined.abstained is not None:
            self.counting.abstained = joined.abstained
        elif self._log.launched:
            self.counting.notes = joined.notes
            watch.sink.feed(joined.window)

    def drop(self) -> None:
        self._sites.close()
        self._recorder.stop()
