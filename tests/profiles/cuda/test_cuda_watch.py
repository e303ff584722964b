"""Both ways to watch a pass, with torch's CPU as the device and a scripted Kineto."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from schedbench.profiles.cuda.calls import NO_WAIT_BELOW, BlockingCalls, CallSites
from schedbench.profiles.cuda.kineto import KinetoRow
from schedbench.profiles.cuda.log import NO_CALL, Log, WallClock
from schedbench.profiles.cuda.watch import BATCH, DeviceHandle, Watch, this_thread
from schedbench.profiles.record.timeline import NO_SITE
from schedbench.profiles.vgpu.sites import Sites
from schedbench.sched.kernels.rows import decode_positions
from schedbench.sched.observe import StepInfo
from tests.profiles.cuda.cpu_machine import Event, cpu_module, identified
from tests.profiles.recorders import WindowRecorder


class AwaitedEvent(Event):
    """An event for which the host waits a millisecond."""

    def synchronize(self):
        time.sleep(0.001)


class Kineto:
    """Returns the rows that a test sets, and records its windows."""

    def __init__(self):
        self.windows, self.rows = [], []

    def start(self):
        self.windows.append("start")

    def stop(self):
        self.windows.append("stop")
        return self.rows


@pytest.fixture
def module():
    return cpu_module(AwaitedEvent)


@pytest.fixture
def kineto():
    return Kineto()


@pytest.fixture
def device(module, kineto):
    return DeviceHandle(
        module=module,
        type="meta",
        handle=lambda stream: stream,
        recorder=lambda: kineto,
        identify=lambda streams: identified(streams, 7, 5),
    )


@pytest.fixture
def recorder():
    return WindowRecorder()


@pytest.fixture
def watching(device, recorder):
    with Watch(device, recorder, inline=65536).installed() as watch:
        watch.stream("schedule", 5)
        yield watch, watch.clock


def step(observer, number):
    info = StepInfo(number, "decode", 4, 4, True)
    with observer.range("prepare", number, 4):
        pass
    for name in ("resolve", "model", "sample", "publish"):
        with observer.range(name, number, 4):
            pass
    observer.launched(info)
    with observer.range("settle", number, 4):
        pass
    observer.settled(info)


def test_a_timed_pass_is_a_span_per_step_and_the_calls_that_waited(watching, recorder, device):
    watch, _ = watching
    watch.flush()  # what opening and warming up left
    step(watch, 1)
    with watch.range("settle", 1, 4):
        device.module.Event().synchronize()
    watch.flush()
    _, window = recorder.windows
    (op,) = window.ops
    assert (op.kind, op.step, op.forward) == ("kernel", 1, True)
    (call,) = window.calls
    assert (call.kind, call.name, call.range, call.step) == ("sync", "cudaEventSynchronize", "settle", 1)
    assert call.waited == call.end - call.start >= NO_WAIT_BELOW["sync"]
    assert {r.name for r in window.ranges} >= {"prepare", "model", "publish"}
    assert [info.step for info in window.launched] == [info.step for info in window.settled] == [1]
    assert watch.streams[op.stream] == "schedule"


def test_the_watchers_own_syncs_are_not_recorded(watching, recorder):
    watch, _ = watching
    watch.flush()
    assert recorder.windows[0].calls == []


def test_a_long_pass_is_read_in_batches(watching, recorder):
    watch, _ = watching
    for number in range(3 * BATCH):
        step(watch, number)
    watch.flush()
    assert [op.step for op in recorder.windows[0].ops] == list(range(3 * BATCH))


def test_a_traced_pass_has_kinetos_rows_with_their_lines(watching, recorder, kineto):
    watch, clock = watching
    watch.flush()
    thread = next(iter(this_thread()))
    with watch.traced() as counting:
        with watch.range("model", 1, 4):
            before = clock.epoch + clock.now()
            time.sleep(0.001)
            after = clock.epoch + clock.now()
        watch.launched(StepInfo(1, "decode", 4, 4, True))
        middle = (before + after) // 2
        kineto.rows = [
            KinetoRow("cuda_runtime", "cudaLaunchKernel", middle, middle + 10, thread, -1, 1, 0, -1, -1),
            KinetoRow("kernel", "k", middle + 20, middle + 30, 0, 7, 1, 0, -1, -1),
        ]
        watch.flush()
    _, window = recorder.windows
    (op,) = window.ops
    assert (op.name, op.step, op.range, watch.streams[op.stream]) == ("k", 1, "model", "schedule")
    assert kineto.windows == ["start", "stop"] * 2
    assert counting.abstained is None
    assert counting.notes["operations"] == 1


def test_an_incomplete_trace_is_not_delivered(watching, recorder):
    watch, _ = watching
    with watch.traced() as counting:
        watch.launched(StepInfo(1, "decode", 4, 4, True))
        watch.flush()
    assert recorder.windows == []
    assert counting.abstained is not None


def test_after_a_traced_pass_the_next_is_timed_again(watching, recorder):
    watch, _ = watching
    with watch.traced():
        watch.flush()
    step(watch, 5)
    watch.flush()
    assert [op.step for op in recorder.windows[-1].ops] == [5]


def test_a_failing_traced_pass_stops_kineto(watching, kineto):
    watch, _ = watching
    with pytest.raises(ZeroDivisionError), watch.traced():
        raise ZeroDivisionError
    assert kineto.windows == ["start", "stop"]


def test_torch_is_as_before_when_the_watch_ends(device, recorder):
    def now():
        names = ("to", "item", "tolist", "cpu", "__bool__")
        return [getattr(torch.Tensor, name) for name in names], torch.tensor, vars(device.module.Event).copy()

    before = now()
    with Watch(device, recorder, inline=0).installed() as watch, watch.traced():
        assert torch.tensor is not before[1]
        watch.flush()
    assert now() == before
    assert "item" not in vars(torch.Tensor)


# ---- calls that wait, with the meta device in the GPU's place ----------------------------------------------------


class SteppingClock:
    """A clock that advances by ``step`` ns at every reading."""

    def __init__(self, step):
        self.at, self.step = 0, step

    def now(self):
        self.at += self.step
        return self.at


@pytest.fixture
def wait_log(module):
    log = BlockingCalls(SteppingClock(30_000), Log(), "meta", lambda: 3)
    with log.installed(module):
        yield log


def test_copies_between_host_and_device_are_timed(wait_log):
    torch.zeros(2).to("meta")
    torch.tensor([1, 2], device="meta")
    assert [(c.kind, c.name, c.waited, c.stream) for c in wait_log.calls] == [
        ("copy", "cudaMemcpyAsync", 30_000, 3)
    ] * 2


def test_copies_within_host_or_device_are_not_timed(wait_log):
    host = torch.tensor([1, 2])
    assert host.to(torch.float32).tolist() == [1.0, 2.0]
    torch.zeros(2, device="meta").to(torch.float64)
    assert bool(host[0]) and int(host[1]) == 2
    assert wait_log.calls == []


def test_a_failing_read_is_no_wait(wait_log):
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.zeros(1, device="meta").item()
    assert wait_log.calls == []


def test_a_short_call_did_not_wait(module):
    log = BlockingCalls(SteppingClock(4_000), Log(), "meta", lambda: 3)
    with log.installed(module):
        module.Stream().synchronize()
        module.synchronize()
    assert [(c.name, c.waited) for c in log.calls] == [
        ("cudaStreamSynchronize", 0),
        ("cudaDeviceSynchronize", 0),
    ]


# ---- the line that called ----------------------------------------------------------------------------------------


@pytest.fixture
def calls(module):
    log = Log()
    here = Sites([Path(__file__)])
    with CallSites(log, SteppingClock(1), here, lambda _: 9).installed(module):
        yield lambda: [(place, here.resolved()) for place in log.calls._values]


def statements(changes):
    return [
        sites[place.site].statement
        for place, sites in changes
        if place is not NO_CALL and place.site != NO_SITE
    ]


def test_every_call_into_torch_is_logged_with_its_statement(calls):
    x = torch.arange(4)
    y = x[1:] + 1
    y[0] = 5
    assert y.tolist() == [5, 3, 4]
    assert statements(calls())[:4] == ["x = torch.arange(4)", "y = x[1:] + 1", "y = x[1:] + 1", "y[0] = 5"]


def test_a_custom_op_is_one_call(calls):
    decode_positions(torch.ones(3, dtype=torch.int64))
    assert statements(calls()).count("decode_positions(torch.ones(3, dtype=torch.int64))") == 2


def test_attributes_are_not_logged(calls):
    x = torch.arange(4)
    before = len(calls())
    assert (x.shape, x.dtype) == ((4,), torch.int64)
    assert len(calls()) == before


def test_events_streams_and_graphs_are_logged(calls, module):
    module.Event().record()
    module.Stream().synchronize()
    module.synchronize()
    module.CUDAGraph().replay()
    entered = [place for place, _ in calls() if place is not NO_CALL]
    assert len({place.call for place in entered}) == len(entered) == 4


def test_a_wait_for_an_event_names_the_stream_of_its_recording(calls, module):
    event = module.Event()
    event.record()
    event.synchronize()
    module.Event().synchronize()
    streams = [place.stream for place, _ in calls() if place is not NO_CALL]
    assert streams == [-1, 9, -1]


def test_nested_calls_end_with_no_call(calls):
    class Outer(torch.Tensor):
        pass

    torch.arange(3).as_subclass(Outer).sum()
    assert calls()[-1][0] is NO_CALL


def test_calls_are_logged_with_the_wall_clock(module):
    log = Log()
    with CallSites(log, WallClock(), Sites([Path(__file__)]), lambda _: 0).installed(module):
        torch.arange(3)
    assert log.calls.current is NO_CALL
