"""Streams, events, syncs and partitions of the device, and the two properties that the virtual GPU exists for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from schedbench.sched.kernels.declare import Work, kernel
from tests.profiles.vgpu.conftest import Bench

FORWARD_NODES = 300


class Pair:
    """A forward of equal kernels on one stream, a schedule on another."""

    def __init__(self, gpu: Any) -> None:
        self.gpu = gpu
        self.module = torch.get_device_module("vgpu")
        self.forward, self.schedule = self.module.Stream(), self.module.current_stream()
        self.hidden = torch.zeros(1 << 20, device=gpu.device)
        self.flag = torch.zeros(8, device=gpu.device)
        self.kernel_ns = gpu.runtime.costs.memory(2 * self.hidden.nbytes)
        self.graph = self.module.CUDAGraph()
        with self.module.graph(self.graph, stream=self.forward):
            for _ in range(FORWARD_NODES):
                self.hidden.neg_()

    def launch(self, *, graph: bool) -> None:
        with self.module.stream(self.forward):
            if graph:
                self.graph.replay()
            else:
                for _ in range(FORWARD_NODES):
                    self.hidden.neg_()


@pytest.mark.parametrize("graph", [True, False])
def test_a_schedule_kernel_waits_for_at_most_one_forward_kernel(bench: Any, graph: bool) -> None:
    pair = Pair(bench.gpu)

    def body() -> None:
        pair.launch(graph=graph)
        pair.flag.add_(1)

    add = next(op for op in bench.observe(body).ops if op.name == "add_")
    assert add.start - add.launched <= pair.kernel_ns


def test_a_blocking_copy_waits_for_the_forward_only_behind_the_barrier(bench: Bench) -> None:
    pair = Pair(bench.gpu)

    def with_barrier(barrier: bool) -> int:
        pair.module.synchronize()
        pair.launch(graph=True)
        if barrier:
            pair.schedule.wait_stream(pair.forward)
        return bench.spent(pair.flag.tolist)

    forward = FORWARD_NODES * pair.kernel_ns
    assert with_barrier(False) < 30_000
    assert with_barrier(True) > 0.9 * forward


def test_a_stream_waits_for_an_event_and_the_wait_is_recorded(bench: Any) -> None:
    module = torch.get_device_module("vgpu")
    side = module.Stream()
    big, small = torch.zeros(1 << 25, device=bench.gpu.device), torch.zeros(8, device=bench.gpu.device)

    def body() -> None:
        with module.stream(side):
            big.neg_()
            done = side.record_event()
        module.current_stream().wait_event(done)
        with bench.gpu.observer.range("of no cost", 7, 1):
            small.neg_()

    recorder = bench.observe(body)
    first, second = recorder.ops
    assert second.start == first.end
    [wait] = recorder.waits
    assert (wait.stream, wait.end, wait.step) == (0, first.end, 7)
    assert wait.start >= second.launched - 1


def test_events_measure_the_time_between_two_points_of_a_stream(bench: Any) -> None:
    module = torch.get_device_module("vgpu")
    x = torch.zeros(1 << 20, device=bench.gpu.device)
    start, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
    start.record()
    x.neg_()
    end.record()
    with pytest.raises(RuntimeError, match="must be completed"):
        start.elapsed_time(end)
    end.synchronize()
    kernel = bench.gpu.runtime.costs.memory(2 * x.nbytes)
    assert start.elapsed_time(end) * 1e6 >= kernel
    with pytest.raises(ValueError, match="enable_timing"):
        module.Event().elapsed_time(end)


def test_queries_and_unrecorded_events(bench: Any) -> None:
    module = torch.get_device_module("vgpu")
    event, x = module.Event(), torch.zeros(1 << 20, device=bench.gpu.device)
    assert event.query()
    event.synchronize()
    event.wait()
    x.neg_()
    event.record()
    assert not event.query() and not module.current_stream().query()
    event.synchronize()
    assert event.query() and module.current_stream().query()


@pytest.mark.parametrize("asked", ["cudaEventQuery", "cudaStreamQuery"])
def test_a_loop_that_only_polls_ends_and_is_a_wait(bench: Any, asked: str) -> None:
    module = torch.get_device_module("vgpu")
    other, event, x = module.Event(), module.Event(), torch.zeros(1 << 24, device=bench.gpu.device)

    def body() -> None:
        x.neg_()
        event.record()
        other.record()
        assert not event.query() and not other.query() and not event.query()
        x.neg_()
        while not (event if asked == "cudaEventQuery" else module.current_stream()).query():
            pass
        assert event.query()

    recorder = bench.observe(body)
    (wait,) = [call for call in recorder.calls if call.kind == "sync"]
    ended = recorder.ops[0 if asked == "cudaEventQuery" else 1].end
    assert wait.name == asked and wait.waited == wait.end - wait.start > 0 and wait.end >= ended > wait.start


def test_waiting_is_counted_from_the_start_of_the_wait(bench: Any) -> None:
    x, event = torch.zeros(1 << 22, device=bench.gpu.device), torch.get_device_module("vgpu").Event()

    def body() -> None:
        x.neg_()
        event.record()
        event.synchronize()
        event.synchronize()

    recorder = bench.observe(body)
    waiting, idle = [c for c in recorder.calls if c.kind == "sync"]
    assert waiting.waited == waiting.end - waiting.start > 0
    assert waiting.end - recorder.ops[0].end == idle.end - idle.start > 0
    assert idle.waited == 0


def test_the_current_stream_is_restored(bench: Any) -> None:  # noqa: ARG001
    module = torch.get_device_module("vgpu")
    side, before = module.Stream(priority=-1), module.current_stream()
    with pytest.raises(KeyError), module.stream(side):
        assert module.current_stream() == side
        raise KeyError
    assert module.current_stream() == before == module.default_stream()
    with module.stream(None):
        assert module.current_stream() == before
    module.set_stream(side)
    assert module.current_stream() == side and side.device == torch.device("vgpu:0")


def test_copies_in_both_directions_and_kernels_overlap(bench: Any) -> None:
    module, device = torch.get_device_module("vgpu"), bench.gpu.device
    up, down = torch.zeros(1 << 22, pin_memory=True), torch.zeros(1 << 22, pin_memory=True)
    target, source, x = (torch.zeros(1 << 22, device=device) for _ in range(3))
    streams = [module.Stream() for _ in range(3)]

    def body() -> None:
        with module.stream(streams[0]):
            target.copy_(up, non_blocking=True)
        with module.stream(streams[1]):
            down.copy_(source, non_blocking=True)
        with module.stream(streams[2]):
            x.neg_()

    spans = {op.kind: (op.start, op.end) for op in bench.observe(body).ops}
    assert max(start for start, _ in spans.values()) < min(end for _, end in spans.values())


def test_a_sync_belongs_to_the_stream_that_is_waited_for(bench: Any) -> None:
    module = torch.get_device_module("vgpu")
    side = module.Stream()

    def body() -> None:
        side.record_event().synchronize()
        side.synchronize()
        module.current_stream().synchronize()

    syncs = [call.stream for call in bench.observe(body).calls if call.kind == "sync"]
    assert syncs == [side.stream_id, side.stream_id, 0]


def _beside_cost() -> Work:
    return Work(bytes=0, host_bytes=50_000_000, beside=True)


@kernel(cost=_beside_cost, footprint=lambda: ())
def streams_test_beside(x: torch.Tensor) -> None:
    """A millisecond of the bus."""


def test_a_kernel_of_few_multiprocessors_overlaps_kernels_and_copies(bench: Any) -> None:
    module, x = torch.get_device_module("vgpu"), torch.ones(4, device=bench.gpu.device)
    side, host = module.Stream(), torch.empty(4, pin_memory=True)

    def body() -> None:
        with module.stream(side):
            streams_test_beside(x)
            streams_test_beside(x)
        x.neg_()
        host.copy_(x, non_blocking=True)

    first, second, negated, copied = sorted(
        bench.observe(body).ops, key=lambda op: (op.name[:6] != "stream", op.start)
    )
    assert second.start >= first.end > first.start + 1_000_000
    assert first.host_bytes == second.host_bytes == 50_000_000
    assert copied.end < first.end and negated.end <= copied.start


# ---- partitions of the multiprocessors ----------------------------------------------------------------------


def partition(num_sms: int) -> Any:
    context = torch.get_device_module("vgpu").green_contexts.GreenContext.create(num_sms=num_sms)
    return context.Stream()


def test_a_kernel_in_a_partition_takes_longer(bench: Any) -> None:
    large = torch.zeros(1 << 22, device=bench.gpu.device)
    total, gap = bench.gpu.runtime.multiprocessors, bench.gpu.runtime.costs.gap
    half = partition(total // 2)

    def body() -> None:
        large.neg_()
        with torch.get_device_module("vgpu").stream(half):
            large.neg_()

    whole, shared = (op for op in bench.observe(body).ops if op.name == "neg_")
    assert shared.end - shared.start == 2 * (whole.end - whole.start) + gap


def test_two_partitions_run_in_parallel(bench: Any) -> None:
    large = [torch.zeros(1 << 24, device=bench.gpu.device) for _ in range(2)]
    streams = [partition(bench.gpu.runtime.multiprocessors // 2) for _ in range(2)]

    def body() -> None:
        for stream, tensor in zip(streams, large, strict=True):
            with torch.get_device_module("vgpu").stream(stream):
                tensor.neg_()

    first, second = (op for op in bench.observe(body).ops if op.name == "neg_")
    assert second.start < first.end


def test_a_partition_is_no_larger_than_the_gpu(bench: Any) -> None:
    with pytest.raises(RuntimeError, match="multiprocessors, not"):
        partition(bench.gpu.runtime.multiprocessors + 1)
