"""The device's API in virtual time: launches, copies, events and syncs, each with its cost to the host.

Calls have the names of the CUDA runtime's, so that they are equal in every source of a timeline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ..record.timeline import CallKind, HostMemory, OpKind, Sink
from .cost import Costs
from .engine import COMPUTE, D2H, H2D, LINK, EventRecording, PeerEventRecording, Simulation, StreamQueue
from .ledger import MAX_CALLS, NO_CONTEXT, Ledger, PlainContext
from .sites import Sites

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ...sched.kernels.declare import Work
    from ..platform.hardware import HardwareProfile

Direction = Literal["h2d", "d2h"]

MEMCPY = "cudaMemcpyAsync"
_WITHIN = "Memcpy DtoD (Device -> Device)"
LAUNCH = "cudaLaunchKernel"
STREAM_SYNC = "cudaStreamSynchronize"
_COPIES: Mapping[tuple[Direction, HostMemory], str] = {
    ("h2d", "pinned"): "Memcpy HtoD (Pinned -> Device)",
    ("h2d", "pageable"): "Memcpy HtoD (Pageable -> Device)",
    ("d2h", "pinned"): "Memcpy DtoH (Device -> Pinned)",
    ("d2h", "pageable"): "Memcpy DtoH (Device -> Pageable)",
}
ENGINES: Mapping[str, int] = {"h2d": H2D, "d2h": D2H}
_FROM_OPS = 4  # innermost frames of a launch or copy that are the tool's: an op's handler and its caller, too


class GraphCaptureError(RuntimeError):
    """A call that a graph under capture cannot contain."""


class TimedByValues(Protocol):
    """A kernel whose time follows from values."""

    @property
    def name(self) -> str: ...

    @property
    def cost(self) -> Callable[..., Work] | None: ...


Recorded = Callable[[StreamQueue, EventRecording], None]
"""Receives a recording and its stream."""


class LaunchRecorder(Protocol):
    """Receives launches instead of the device while a graph is captured."""

    def variable(self, kernel: TimedByValues, args: Sequence[Any]) -> None:
        """A kernel whose time depends on values, and is therefore computed at the replay."""

    def node(self, kind: OpKind, name: str, duration: int, *, size: int = 0, host_size: int = 0) -> None: ...

    def mark(self, recorded: Recorded) -> None:
        """An event that each replay records here."""


class Runtime:
    """One host thread and one device. ``now`` is the host's clock, in ns."""

    def __init__(
        self, hardware: HardwareProfile, sink: Sink | None, sites: Sites, simulation: Simulation | None
    ) -> None:
        """``simulation`` is given to one of several devices that wait for one another."""
        self.hardware = hardware
        self.costs = Costs(hardware)
        self.multiprocessors = hardware.gpu.multiprocessors
        self.now = 0
        self.context: PlainContext = NO_CONTEXT
        self.simulation = simulation or Simulation(gap=self.costs.gap)
        self.default = self.stream = self.simulation.queue()
        self.sites = sites
        self.ledger = Ledger(sink, served=self.simulation.served, waits=self.simulation.waits)
        self._calls = self.ledger.calls
        self.capture: LaunchRecorder | None = None
        host = hardware.host
        self.torch_call = round(host.torch_call.value)
        self.kernel_call = round((host.kernel_call or host.torch_call).value)
        self._launch = round(host.launch.value)
        self._copy_call = round(host.copy_call.value)
        self._event_record = round(host.event_record.value)
        self._event_wait = round(host.event_wait.value)
        self._sync_return = round(host.sync_return.value)
        self._graph_launch = round(host.graph_launch.value)
        self._pin_memory = round(host.pin_memory.value)
        self._last_unreached = -1  # the time of the last query, where its answer was no
        self._polled: tuple[object, int] = (None, 0)  # what the program asked for last, and since when

    def kernel(
        self, name: str, duration: int, *, host_size: int = 0, engine: int = COMPUTE, call: int | None = None
    ) -> None:
        """Launch a kernel on the current stream. Kernels that need few multiprocessors share another ``engine``.
        ``call`` is the host's time before the launch, by default that of a torch call."""
        if self.capture is not None:
            self.capture.node("kernel", name, duration, host_size=host_size)
            return
        start = self.now + (self.torch_call if call is None else call)
        self.now = now = start + self._launch
        stream, calls, site = self.stream, self._calls, self.sites.here(_FROM_OPS)
        where, step, forward = self.context
        calls.append(("launch", LAUNCH, start, now, 0, stream.id, where, step, site))
        if stream.partition != COMPUTE:  # on a share of the GPU, as if it were bound by the multiprocessors
            engine, duration = stream.partition, round(duration / stream.share) + self.costs.gap
        row = ("kernel", name, stream.id, 0, host_size, "", False, where, forward, step, site, now, 1)
        self.simulation.submit(stream, engine, now, duration, row)
        if len(calls) >= MAX_CALLS:
            self.cut()

    def copy_within(self, size: int) -> None:
        """Copy ``size`` bytes within the device's memory on the current stream."""
        duration = self.costs.memory(2 * size)
        if self.capture is not None:
            self.capture.node("d2d", _WITHIN, duration, size=size)
            return
        start = self.now + self.torch_call
        self.now = now = start + self._copy_call
        stream, site = self.stream, self.sites.here(_FROM_OPS)
        self._call("copy", MEMCPY, start, 0, site)
        where, step, forward = self.context
        row = ("d2d", _WITHIN, stream.id, size, 0, "", False, where, forward, step, site, now, 1)
        self.simulation.submit(stream, COMPUTE, now, duration, row)

    def copy(self, direction: Direction, size: int, *, pinned: bool, blocking: bool) -> bool:
        """Copy between host and device on the current stream; ``blocking`` adds a stream sync, as torch does. Returns
        whether the host waits for the copy.

        A pageable source up to the inline size is read inside the call; with a larger one, and with every pageable
        destination, the call returns when the copy has ended.
        """
        if self.capture is not None:
            if blocking or not pinned:
                raise GraphCaptureError(
                    "operation not permitted when stream is capturing: a copy that may block"
                )
            duration = self.costs.copy(direction, size, pinned=True)
            self.capture.node(direction, _COPIES[direction, "pinned"], duration, size=size)
            return False
        inline = direction == "h2d" and not pinned and size <= self.costs.inline
        waits_inside = not pinned and not inline
        start = self.now + self.torch_call
        self.now = start + self._copy_call + (self.costs.memcpy(size) if inline else 0)
        stream, site = self.stream, self.sites.here(_FROM_OPS)
        memory: HostMemory = "pinned" if pinned else "pageable"
        name, waits = _COPIES[direction, memory], blocking or waits_inside
        where, step, forward = self.context
        row = (direction, name, stream.id, size, 0, memory, waits, where, forward, step, site, self.now, 1)
        duration = self.costs.copy(direction, size, pinned=pinned or inline)
        self.simulation.submit(stream, ENGINES[direction], self.now, duration, row)
        waited = self._wait(self.simulation.record(stream, self.now)) if waits_inside else 0
        self._call("copy", MEMCPY, start, waited, site)
        if blocking:
            self.synchronize(stream, site=site)
        return waits

    def synchronize(self, stream: StreamQueue, *, site: int | None = None) -> None:
        """The host waits for everything enqueued on the stream."""
        self._refuse_in_capture(STREAM_SYNC)
        recording = self.simulation.record(stream, self.now)
        self._sync(STREAM_SYNC, stream, recording, self.sites.here() if site is None else site)

    def synchronize_event(self, stream: StreamQueue, recording: EventRecording) -> None:
        """The host waits for the recording, which was made on the stream."""
        self._sync("cudaEventSynchronize", stream, recording, self.sites.here())

    def synchronize_device(self) -> None:
        self._refuse_in_capture("cudaDeviceSynchronize")
        recording = EventRecording()
        recording.time = self.simulation.drain()
        self._sync("cudaDeviceSynchronize", self.stream, recording, self.sites.here())

    def record(self, stream: StreamQueue) -> EventRecording:
        """Record an event on the stream. During a capture, program order is the only order."""
        if self.capture is None:
            start, self.now = self.now, self.now + self._event_record
            self._call("event", "cudaEventRecord", start, 0, self.sites.here(), stream)
        return self.simulation.record(stream, self.now)

    def record_in_graph(self) -> EventRecording:
        """A recording on the current stream, which the replay of a graph makes: its time is not known before
        ``simulation`` has it. It certainly comes after what precedes the graph."""
        return EventRecording()

    def wait_event(self, stream: StreamQueue, recording: EventRecording) -> None:
        """Make the stream wait for the recording."""
        if self.capture is not None:
            return
        start, self.now = self.now, self.now + self._event_wait
        self._call("event", "cudaStreamWaitEvent", start, 0, self.sites.here(), stream)
        self.simulation.wait_event(stream, recording)

    def order_after_current(self, queue: StreamQueue) -> None:
        """Later work of the queue starts after the current stream's present work. This is no call of the host's."""
        self.simulation.wait_event(queue, self.simulation.record(self.stream, self.now))

    def send(self, queue: StreamQueue, duration: int, *, size: int, name: str) -> EventRecording:
        """Send ``size`` bytes over a link by the link's queue, which ``order_after_current`` has ordered. Returns the
        recording of their departure."""
        self._refuse_in_capture(name)
        start, self.now = self.now, self.now + self._launch
        site = self.sites.here()
        where, step, forward = self.context
        row = ("send", name, queue.id, size, 0, "", False, where, forward, step, site, self.now, 1)
        self.simulation.submit(queue, LINK, self.now, duration, row)
        self._call("launch", name, start, 0, site, queue)
        return self.simulation.record(queue, self.now)

    def wait_peer_event(self, recording: PeerEventRecording) -> None:
        """Later work of the current stream starts after the arrival of what another device sends."""
        start, self.now = self.now, self.now + self._event_wait
        self._call("event", "cudaStreamWaitEvent", start, 0, self.sites.here())
        self.simulation.wait_event(self.stream, recording)

    def host_clock(self) -> Sequence[int]:
        """The host's vector clock, for another device's host; empty unless hazards are checked."""
        return ()

    def join_host_clock(self, clock: Sequence[int]) -> None:
        """The host has received a message of another device's host, whose vector clock this is."""

    def wait_for_host(self, until: int, name: str, stream: StreamQueue) -> None:
        """The host waits for another rank's host."""
        start = self.now
        self.now = max(start, until)
        self._call("link", name, start, self.now - start, self.sites.here(), stream)

    def reached(self, recording: EventRecording) -> bool:
        """Whether the device has reached the recording by now. A query costs nothing, but to ask again at the same time
        costs as much as a recording, so that a loop that polls ends."""
        if self.now == self._last_unreached:
            self.now += self._event_record
        self.simulation.settle(self.now)
        reached = recording.time is not None and recording.time <= self.now
        self._last_unreached = -1 if reached else self.now
        return reached

    def idle(self, stream: StreamQueue) -> bool:
        """Whether everything enqueued on the stream has ended by now."""
        return self.reached(self.simulation.record(stream, self.now))

    def query(self, stream: StreamQueue, recording: EventRecording | None = None) -> bool:
        """Whether the recording, or else the stream, is done. A loop that only asks the same until it is, is a wait."""
        asked, (last, since) = recording or stream, self._polled
        since = since if self.now == self._last_unreached and asked is last else self.now
        self._polled = asked, since
        reached = self.reached(recording) if recording else self.idle(stream)
        if reached and self.now > since:
            name = "cudaEventQuery" if recording else "cudaStreamQuery"
            self._call("sync", name, since, self.now - since, self.sites.here(), stream)
        return reached

    def graph_launch(self) -> int:
        """The host's part of a replay; returns the call's site."""
        start, site = self.now, self.sites.here()
        self.now += self._graph_launch
        self._call("graph", "cudaGraphLaunch", start, 0, site)
        return site

    def pin(self, size: int, *, copied: bool) -> None:
        """The host allocates pinned memory, and copies pageable memory into it if ``copied``."""
        self.now += self._pin_memory + (self.costs.memcpy(size) if copied else 0)

    def cut(self, step: int | None = None) -> None:
        """Deliver a window up to now, or up to the end of that step's forward."""
        self.simulation.settle(self.now)
        self.ledger.cut(self.now if step is None else self.ledger.quiet_point(step, self.now))

    def flush(self) -> None:
        """Finish all work and deliver the rest; the host's clock stays."""
        self.simulation.drain()
        if not self.ledger.empty:
            self.ledger.cut(self.ledger.end())

    def _sync(self, name: str, stream: StreamQueue, recording: EventRecording, site: int) -> None:
        """Wait for the recording and return from the call."""
        self._refuse_in_capture(name)
        start, waited = self.now, self._wait(recording)
        self.now += self._sync_return
        self._call("sync", name, start, self.now - start if waited else 0, site, stream)

    def _wait(self, recording: EventRecording) -> int:
        before = self.now
        self.now = max(before, self.simulation.wait(recording))
        return self.now - before

    def _call(
        self, kind: CallKind, name: str, start: int, waited: int, site: int, stream: StreamQueue | None = None
    ) -> None:
        where, step, _ = self.context
        on = (stream or self.stream).id
        self._calls.append((kind, name, start, self.now, waited, on, where, step, site))

    def _refuse_in_capture(self, name: str) -> None:
        if self.capture is not None:
            raise GraphCaptureError(f"operation not permitted when stream is capturing: {name}")
