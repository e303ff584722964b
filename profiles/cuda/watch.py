"""The two ways to watch a pass, and the observer that serves both.

timed   two events per step, and a clock around the calls that wait. Throughput, latency, stalls, occupancy.
traced  Kineto and the source line of every call. Counts. Slower on the host, so none of its times are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from ...sched.observe import Silence, StepInfo
from ..machine import Counting
from ..timeline import Sink, Window
from ..vgpu.sites import Sites
from .clock import WallClock
from .join import Source, join
from .kineto import Row
from .log import Context, Log, OpenRange
from .places import CallSites
from .spans import StepSpans, TimingEvent
from .streams import StreamTable
from .waits import WaitLog


class Recorder(Protocol):
    """A window of Kineto."""

    def start(self) -> None: ...

    def stop(self) -> list[Row]: ...


@dataclass(frozen=True, slots=True)
class Device:
    """What watching needs of torch.cuda, so that a test can be without it."""

    module: Any  # torch.cuda or its like
    type: str
    synchronize: Callable[[], None]  # taken before calls that wait are replaced: ours are nobody's stall
    event: Callable[[], TimingEvent]
    handle: Callable[[Any], int]  # of a stream
    current: Callable[[], int]  # handle of the current stream
    recorder: Callable[[], Recorder]
    identify: Callable[[StreamTable], None]
    threads: Callable[[], frozenset[int]]


class CudaObserver(Silence):
    """Ranges, steps and streams of the pass under way, and its spans where it is timed."""

    def __init__(self, clock: WallClock, streams: StreamTable, handle: Callable[[Any], int]) -> None:
        self.log = Log()
        self.spans: StepSpans | None = None
        self._clock = clock
        self._streams = streams
        self._handle = handle

    def begin(self, spans: StepSpans | None) -> Log:
        self.log, self.spans = Log(), spans
        return self.log

    def range(self, name: str, step: int, size: int) -> AbstractContextManager[object]:
        context = self.log.contexts.current.inside(name, step)
        if self.spans is None or not context.forward:
            return OpenRange(self.log, self._clock, context, size)
        return _SpannedRange(self.log, self._clock, context, size, self.spans)

    def stream(self, name: str, stream: Any) -> None:
        self._streams.announce(name, self._handle(stream))

    def launched(self, info: StepInfo) -> None:
        self.log.launched.append(info)

    def settled(self, info: StepInfo) -> None:
        self.log.settled.append(info)
        if self.spans is not None:
            self.spans.settled(info.step)


class _SpannedRange(OpenRange):
    """A forward range of a timed pass: the first of a step begins its span, and every one may end it."""

    __slots__ = ("_spans",)

    def __init__(self, log: Log, clock: WallClock, context: Context, size: int, spans: StepSpans) -> None:
        super().__init__(log, clock, context, size)
        self._spans = spans

    def __enter__(self) -> None:
        super().__enter__()
        self._spans.open(self._context.step)

    def __exit__(self, *raised: Any) -> None:
        if self._context.range == "publish":
            self._spans.close(self._context.step)
        super().__exit__(*raised)


class Watch:
    """The watcher of one machine: timed until told otherwise."""

    def __init__(self, device: Device, clock: WallClock, *, sink: Sink, sites: Sites, inline: int) -> None:
        self.streams = StreamTable()
        self.observer = CudaObserver(clock, self.streams, device.handle)
        self._device = device
        self._clock = clock
        self._sink = sink
        self._sites = sites
        self._inline = inline
        self._deliver = self._nothing

    @contextmanager
    def timed(self) -> Iterator[None]:
        """What runs in this block is timed, save inside ``traced``."""
        self._waits = WaitLog(self._clock, Log(), self._device.type, self._current)
        self._begin_timed()
        with self._waits.installed(self._device.module):
            yield

    @contextmanager
    def traced(self) -> Iterator[Counting]:
        """A pass of its own: its window is delivered at the next flush."""
        device, counting = self._device, Counting()
        device.synchronize()
        device.identify(self.streams)
        log = self.observer.begin(spans=None)
        recorder = device.recorder()
        recorder.start()
        self._start = self._clock.now()
        deliver = self._deliver = lambda: self._deliver_traced(recorder, log, counting)
        try:
            with CallSites(log, self._clock, self._sites, self._number).installed(device.module):
                yield counting
        finally:
            if self._deliver is deliver:  # the pass broke off: nothing to count
                recorder.stop()
                self._begin_timed()

    def flush(self) -> None:
        """Let the device finish, and deliver the pass that ends here."""
        self._end = self._clock.now()
        self._device.synchronize()
        self._deliver()
        self._begin_timed()

    def _nothing(self) -> None: ...

    def _begin_timed(self) -> None:
        spans = StepSpans(self._device.event, self._current, self._device.synchronize, self._clock)
        self._waits.log = self.observer.begin(spans)
        self._waits.calls = []
        self._start = self._clock.now()
        spans.anchor()
        self._deliver = lambda: self._deliver_timed(spans)

    def _deliver_timed(self, spans: StepSpans) -> None:
        spans.anchor()
        log = self.observer.log
        self._sink.feed(
            Window(
                self._start,
                self._clock.now(),
                ranges=log.ranges,
                ops=spans.ops(),
                calls=self._waits.calls,
                launched=log.launched,
                settled=log.settled,
            )
        )

    def _deliver_traced(self, recorder: Recorder, log: Log, counting: Counting) -> None:
        rows = recorder.stop()
        device, clock = self._device, self._clock
        source = Source(log, self.streams, device.threads(), clock.epoch, self._inline)
        joined = join(rows, source, start=self._start, end=self._end)
        counting.abstained, counting.notes = joined.abstained, joined.notes
        if joined.abstained is None:
            self._sink.feed(joined.window)

    def _current(self) -> int:
        return self.streams.by_handle(self._device.current())

    def _number(self, stream: Any) -> int:
        return self._current() if stream is None else self.streams.by_handle(self._device.handle(stream))
