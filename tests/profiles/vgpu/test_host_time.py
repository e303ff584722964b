"""Host time by a stopwatch: the scheduler's own Python counts, the tool does not."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from statistics import median
from typing import Any

import pytest
import torch

from schedbench.profiles.platform.hardware import HardwareProfile
from schedbench.profiles.vgpu import host_time
from schedbench.profiles.vgpu.device import VirtualGpu
from schedbench.profiles.vgpu.executor import Executor
from schedbench.profiles.vgpu.gpu import open_vgpu
from schedbench.profiles.vgpu.host_time import HostStopwatch, measured, without_own_time
from schedbench.profiles.vgpu.streams import Event
from schedbench.profiles.vgpu.tensor import DeviceTensor


def busy(ns: int) -> None:
    """Uses processor time, however often the thread is preempted."""
    end = time.thread_time_ns() + ns
    while time.thread_time_ns() < end:
        pass


@dataclass
class Host:
    gpu: VirtualGpu
    stopwatch: HostStopwatch

    def time(self, body: Callable[[], Any]) -> int:
        """Returns ns on the host's clock."""
        before = self.gpu.clock.now()
        with self.stopwatch.running():
            body()
        return self.gpu.clock.now() - before


@pytest.fixture
def free(hardware: HardwareProfile) -> HardwareProfile:
    """Device calls cost the host nothing, so only measured time is left."""
    calls = hardware.host
    nothing = {name: quantity and quantity.model_copy(update={"value": 0.0}) for name, quantity in calls}
    return without_own_time(hardware.model_copy(update={"host": calls.model_copy(update=nothing)}))


@pytest.fixture
def host(free: HardwareProfile) -> Iterator[Host]:
    with open_vgpu(free) as gpu, measured(gpu) as stopwatch:
        yield Host(gpu, stopwatch)


def least(measure: Callable[[], int]) -> int:
    """Returns the least of five measurements, because other processes only add to them."""
    return min(measure() for _ in range(5))


def time_taken(body: Callable[[], Any]) -> int:
    """Returns ns of this thread's processor time."""
    start = time.thread_time_ns()
    body()
    return time.thread_time_ns() - start


class SlowExecutor(Executor):
    """Takes a millisecond for each computed value."""

    def compute(self, op: Any, args: Any, kwargs: Any) -> Any:
        busy(1_000_000)
        return super().compute(op, args, kwargs)

    def mutate(self, op: Any, args: Any, kwargs: Any) -> None:
        busy(1_000_000)
        super().mutate(op, args, kwargs)

    def upload(self, target: torch.Tensor, source: torch.Tensor, *, pinned: bool, waits: bool) -> None:
        busy(1_000_000)
        super().upload(target, source, pinned=pinned, waits=waits)


def test_python_advances_the_clock(host: Host) -> None:
    assert least(lambda: host.time(lambda: busy(2_000_000))) == pytest.approx(2_000_000, rel=0.05)


def test_time_before_and_after_the_stopwatch_does_not_count(host: Host) -> None:
    busy(1_000_000)
    assert host.gpu.clock.now() == 0
    host.time(lambda: None)
    before = host.gpu.clock.now()
    busy(1_000_000)
    torch.ones(4, device=host.gpu.device)
    assert host.gpu.clock.now() == before


def test_the_stopwatchs_own_time_is_subtracted(host: Host) -> None:
    """Both ways alternate, and the overhead is measured each time, because the speed of the machine changes."""

    def charged(*, subtracted: bool) -> int:
        stopwatch = HostStopwatch(host.gpu.runtime)
        nothing = stopwatch.off(lambda: None)
        if not subtracted:
            stopwatch._overhead = 0

        def body() -> None:
            for _ in range(5_000):
                nothing()

        return Host(host.gpu, stopwatch).time(body)

    shares = [charged(subtracted=True) / charged(subtracted=False) for _ in range(9)]
    assert median(shares) < 0.5


def upload(gpu: VirtualGpu) -> None:
    torch.arange(64).to(gpu.device)


def build(gpu: VirtualGpu) -> None:
    torch.zeros(64, device=gpu.device)


def generate(gpu: VirtualGpu) -> None:
    torch.arange(64, device=gpu.device)


def compute(gpu: VirtualGpu) -> None:
    build(gpu)
    torch.ones(8, device=gpu.device) + 1


def index(gpu: VirtualGpu) -> None:
    x = torch.zeros(64, device=gpu.device)
    x[[1, 2]] = 1.0


def replay(gpu: VirtualGpu) -> None:
    module = torch.get_device_module(gpu.device)
    x, graph = torch.zeros(8, device=gpu.device), module.CUDAGraph()
    with module.graph(graph):
        x.add_(1)
    graph.replay()


@pytest.mark.parametrize("call", [upload, build, generate, compute, index, replay])
def test_computing_values_does_not_advance_the_clock(host: Host, call: Callable[[VirtualGpu], None]) -> None:
    host.gpu.executor = SlowExecutor()
    call(host.gpu)  # handlers are built on first sight
    start = time.thread_time_ns()
    charged = least(lambda: host.time(lambda: call(host.gpu)))
    assert time.thread_time_ns() - start > 5_000_000
    assert charged < 500_000


def test_reading_a_number_does_not_advance_the_clock(host: Host) -> None:
    x = torch.ones(1, device=host.gpu.device)
    host.gpu.executor.read = lambda *_: busy(2_000_000) or 1.0  # type: ignore[method-assign, func-returns-value]
    assert least(lambda: host.time(x.item)) < 500_000


def test_pinning_costs_its_declared_time(hardware: HardwareProfile) -> None:
    """The emulator makes the copy into pinned memory; its cost is that of the profile."""
    with open_vgpu(without_own_time(hardware)) as gpu, measured(gpu) as stopwatch:
        source, kept = torch.zeros(1 << 24, dtype=torch.uint8), []
        charged = least(lambda: Host(gpu, stopwatch).time(lambda: kept.append(source.pin_memory())))
    declared = hardware.host.pin_memory.value + 1e9 * (1 << 24) / hardware.copies.host_memcpy.value
    assert charged == pytest.approx(declared, rel=0.1)


def test_phases_and_torch_count_once(hardware: HardwareProfile) -> None:
    bare = without_own_time(hardware)
    assert (bare.host.torch_call.value, bare.phases) == (0, {})
    assert (bare.host.launch, bare.kernels, bare.sha256) == (
        hardware.host.launch,
        hardware.kernels,
        hardware.sha256,
    )


def test_a_launch_costs_its_declared_time_and_torchs(hardware: HardwareProfile) -> None:
    with open_vgpu(without_own_time(hardware)) as gpu, measured(gpu) as stopwatch:
        host, x = Host(gpu, stopwatch), torch.ones(8, device=gpu.device)

        def body() -> None:
            for _ in range(100):
                x.add_(1)

        pairs = [(host.time(body), time_taken(body)) for _ in range(9)]
    declared = 100 * hardware.host.launch.value
    assert all(charged > declared for charged, _ in pairs)
    # Of what the same calls take, the virtual GPU's part is the larger one.
    assert median((charged - declared) / taken for charged, taken in pairs) < 0.5


def test_records_are_at_the_time_of_their_call(host: Host) -> None:
    """The clock is updated before the virtual GPU reads it."""
    x = torch.ones(8, device=host.gpu.device)

    def body() -> None:
        busy(1_000_000)
        x.add_(1)

    def called_after() -> int:
        host.gpu.flush()
        before = host.gpu.clock.now()
        host.time(body)
        return host.gpu.runtime.ledger.calls[-1][2] - before

    assert least(called_after) == pytest.approx(1_000_000, rel=0.1)


class Listener:
    def __init__(self) -> None:
        self.received: list[str] = []

    def tokens(self, name: str) -> None:
        busy(500_000)
        self.received.append(name)

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        busy(500_000)
        self.received.append(f"open {name}")
        yield
        busy(500_000)
        self.received.append(f"close {name}")


def test_listeners_and_their_ranges_do_not_advance_the_clock(host: Host) -> None:
    listener = Listener()
    excluded = host.stopwatch.excluded(listener)

    def body() -> None:
        with excluded.range("step"):
            excluded.tokens("r0")
            busy(500_000)

    assert least(lambda: host.time(body)) == pytest.approx(500_000, rel=0.2)
    assert listener.received[:3] == ["open step", "r0", "close step"]


def test_a_method_of_a_listener_may_be_replaced(host: Host) -> None:
    listener = Listener()
    excluded = host.stopwatch.excluded(listener)
    excluded.tokens("r0")
    listener.tokens = listener.received.append  # type: ignore[method-assign]
    excluded.tokens("again")
    assert listener.received == ["r0", "again"]


def test_errors_propagate_and_the_clock_continues(host: Host) -> None:
    x = torch.ones(4, device=host.gpu.device)

    def body() -> None:
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.ones(4)
        assert host.stopwatch.is_running
        busy(1_000_000)

    assert host.time(body) > 1_000_000
    assert not host.stopwatch.is_running


def test_garbage_collection_does_not_advance_the_clock(host: Host) -> None:
    kept = [[k] for k in range(200_000)]
    start = time.thread_time_ns()
    charged = host.time(gc.collect)
    assert charged < (time.thread_time_ns() - start) / 2
    assert len(kept) == 200_000


def test_sleeping_counts_and_waiting_for_a_processor_does_not(host: Host) -> None:
    """Here, a process that never ends shares the only processor."""
    assert least(lambda: host.time(lambda: time.sleep(0.02))) == pytest.approx(20_000_000, rel=0.1)
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(everywhere)})
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.5)
        start = time.perf_counter_ns()
        assert least(lambda: host.time(lambda: busy(50_000_000))) == pytest.approx(50_000_000, rel=0.1)
        assert time.perf_counter_ns() - start > 5 * 70_000_000
    finally:
        other.kill()
        other.wait()
        os.sched_setaffinity(0, everywhere)


def test_lost_processor_time_of_the_tool_is_not_subtracted_from_the_scheduler(host: Host) -> None:
    pause = host.stopwatch.off(lambda: time.sleep(0.02))

    def body() -> None:
        pause()
        busy(2_000_000)

    assert least(lambda: host.time(body)) == pytest.approx(2_000_000, rel=0.1)


def test_short_waits_of_the_tool_are_not_subtracted_from_a_later_interval(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = count(
        step=1_000_000_000
    )  # a second between two readings, in intervals that are too short for one
    monkeypatch.setattr(host_time, "_interrupted", lambda: next(readings))
    assert least(lambda: host.time(lambda: busy(2_000_000))) == pytest.approx(2_000_000, rel=0.1)


def test_a_wait_between_the_reading_and_the_interval_is_not_subtracted_from_it(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = [20_000_000]
    waited = 0

    def interrupted_behind_the_reading() -> int:
        nonlocal waited
        reading = waited
        if waits:
            waited += waits.pop()
            time.sleep(0.02)
        return reading

    monkeypatch.setattr(host_time, "_interrupted", interrupted_behind_the_reading)
    assert host.time(lambda: time.sleep(0.02)) > 19_000_000


def test_entry_points_are_restored_afterwards(hardware: HardwareProfile) -> None:
    before = vars(DeviceTensor)["__torch_dispatch__"], Event.record
    with open_vgpu(hardware) as gpu, measured(gpu):
        assert (vars(DeviceTensor)["__torch_dispatch__"], Event.record) != before
    assert (vars(DeviceTensor)["__torch_dispatch__"], Event.record) == before
    with open_vgpu(hardware) as gpu:
        assert torch.ones(2, device=gpu.device).tolist() == [1, 1]
