"""What watching needs of torch.cuda, named, so that a test can be without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from ..platform.machine import Counting
from ..record.timeline import Sink, Window
from ..vgpu.sites import Sites
from .blocking_calls import WaitLog
from .call_sites import CallSites
from .clock import WallClock
from .join import JoinInputs, join
from .kineto import KinetoRow
from .log import Log
from .observer import CudaObserver
from .step_spans import StepSpans, TimingEvent
from .streams import StreamTable


class KinetoRecorder(Protocol):
    """A window of Kineto."""

    def start(self) -> None: ...

    def stop(self) -> list[KinetoRow]: ...


@dataclass(frozen=True, slots=True)
class DeviceHandle:
    """A device module and how to ask it."""

    module: Any  # torch.cuda or its like
    type: str
    synchronize: Callable[[], None]  # taken before calls that wait are replaced: ours are nobody's stall
    event: Callable[[], TimingEvent]
    handle: Callable[[Any], int]  # of a stream
    current: Callable[[], int]  # handle of the current stream
    recorder: Callable[[], KinetoRecorder]
    identify: Callable[[StreamTable], frozenset[int]]  # finds CUPTI's streams, returns numbers of this thread
    threads: Callable[[], frozenset[int]]


class _Period(Protocol):
    """From one flush to the next."""

    def deliver(self, end: int) -> None:
        """To the sink; ``end`` is when the flush was asked for, and the device is idle by now."""

    def drop(self) -> None:
        """Nobody wants it."""


class Watch:
    """The watcher of one machine: timed until told otherwise."""

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
        self._waits = WaitLog(clock, Log(), device.type, self._current)
        self._period = self._timed()
        self._replaced = ExitStack()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Calls that wait are timed in this block."""
        with self._replaced:
            self._install()
            yield

    @contextmanager
    def uninstalled(self) -> Iterator[None]:
        """Inside ``installed``: calls are torch's own in this block."""
        self._replaced.close()
        try:
            yield
        finally:
            self._install()

    def _install(self) -> None:
        self._replaced.enter_context(self._waits.installed(self.device.module))

    @contextmanager
    def traced(self) -> Iterator[Counting]:
        """Periods are traced in this block; what follows its last flush is lost."""
        counting = Counting()
        self.threads = self.device.threads() | self.device.identify(self.streams)
        self._period.drop()
        self._period = _Traced(self, counting)
        try:
            yield counting
        finally:
            self._period.drop()
            self._period = self._timed()

    def flush(self) -> None:
        """Let the device finish, deliver the period that ends here, and begin another of its kind."""
        end = self.clock.now()
        self.device.synchronize()
        period = self._period
        period.deliver(end)
        self._period = _Traced(self, period.counting) if isinstance(period, _Traced) else self._timed()

    def number(self, stream: Any) -> int:
        """Of a stream, or for None of the current one."""
        return self._current() if stream is None else self.streams.by_handle(self.device.handle(stream))

    def _current(self) -> int:
        return self.streams.by_handle(self.device.current())

    def _timed(self) -> _Period:
        spans = StepSpans(self.device.event, self._current, self.device.synchronize, self.clock)
        log = self._waits.begin(self.observer.begin(spans))
        return _Timed(self, spans, self._waits, log)


@dataclass(slots=True)
class _Timed:
    watch: Watch
    spans: StepSpans
    waits: WaitLog
    log: Log
    start: int = 0

    def __post_init__(self) -> None:
        self.start = self.watch.clock.now()
        self.spans.anchor()

    def deliver(self, end: int) -> None:  # noqa: ARG002 - what ended by now belongs to it
        self.spans.anchor()
        log = self.log
        self.watch.sink.feed(
            Window(
                self.start,
                self.watch.clock.now(),
                ranges=log.ranges,
                ops=self.spans.ops(),
                calls=self.waits.calls,
                launched=log.launched,
                settled=log.settled,
            )
        )

    def drop(self) -> None: ...


class _Traced:
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
