"""A whole run in two passes, on torch's CPU in CUDA's place."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from schedbench.profiles.cuda.capture import this_thread
from schedbench.profiles.cuda.device import Device
from schedbench.profiles.cuda.kineto import Row
from schedbench.profiles.cuda.machine import watched
from schedbench.profiles.cuda.names import WatchedNames
from schedbench.profiles.result import Abstained, HardwarePart, Labels, Outputs
from schedbench.profiles.run.machine import Machine
from schedbench.profiles.run.passes import agreed, measured
from schedbench.profiles.run.resolve import resolve
from schedbench.profiles.run.runner import Bench, Valve, nobody
from schedbench.scenarios.loader import load
from schedbench.sched.config import Capabilities

SET = ["workload.requests=3", "workload.prompt_tokens.max=160", "workload.output_tokens.max=8"]


class Event:
    def record(self):
        self.at = time.perf_counter_ns()

    def wait(self):
        """Nothing runs beside the host."""

    def synchronize(self):
        """Everything is done already."""

    def elapsed_time(self, end):
        return (end.at - self.at) / 1e6


class Kineto:
    """Says that every range held one copy to the device, behind which torch synchronised."""

    def __init__(self, watch):
        self.watch = watch

    def start(self):
        self.log = self.watch().observer.log

    def stop(self):
        watch = self.watch()
        epoch, thread = watch.clock.epoch, next(iter(this_thread()))
        return sorted(
            row for n, r in enumerate(watch.observer.log.ranges) for row in _copy(n, r, epoch, thread)
        )


def _copy(n, held, epoch, thread):
    at = epoch + held.start
    yield Row("cuda_runtime", "cudaMemcpyAsync", at, at + 2, thread, -1, 2 * n, 0, -1, -1)
    yield Row("cuda_runtime", "cudaStreamSynchronize", at + 2, at + 4, thread, -1, 2 * n + 1, 0, -1, -1)
    yield Row("cuda_sync", "Stream Sync", at + 2, at + 4, 7, 7, 2 * n + 1, 0, -1, -1)
    yield Row("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", at + 2, at + 3, 7, 7, 2 * n, 8, -1, -1)


def identified(streams, cupti, handle):
    streams.identify(cupti, handle)
    return frozenset()


@pytest.fixture
def resolved():
    return resolve(load("mixed", SET))


@pytest.fixture
def bench(resolved):
    """A bench over a machine without streams, whose traced pass is made up."""
    valve = Valve()
    module = SimpleNamespace(
        Event=type("Event", (Event,), {}),
        Stream=type("Stream", (), {"synchronize": lambda _: None}),
        CUDAGraph=type("Graph", (), {"replay": lambda _: None}),
        synchronize=lambda: None,
    )
    held = []
    device = Device(
        module=module,
        type="cuda",
        synchronize=module.synchronize,
        event=module.Event,
        handle=lambda _: 1,
        current=lambda: 1,
        recorder=lambda: Kineto(lambda: held[0]),
        identify=lambda streams: identified(streams, 7, 1),
        threads=this_thread,
    )
    nothing = Capabilities(pinned_memory=False, side_streams=False, events=False, graphs=False)
    with torch.no_grad(), watched(device, valve, inline=0) as (watch, clock, sites):
        held.append(watch)
        machine = Machine(
            device=torch.device("cpu"),
            capabilities=nothing,
            clock=clock,
            observer=watch.observer,
            names=WatchedNames(sites, watch.streams),
            labels=Labels(emulated=False, host="measured"),
            hardware=HardwarePart(name="cpu"),
            exact=False,
            flush=watch.flush,
            peek=torch.Tensor.cpu,
            environment={},
            traced=watch.traced,
        )
        bench = Bench(resolved, machine, resolved.relays[0], valve)
        bench.warm_up()
        yield bench


def test_counts_are_of_the_traced_pass_and_times_of_the_timed_one(bench):
    found = measured(bench, bench.machine, nobody, save_tokens=True)
    assert isinstance(found.outputs, Outputs)
    assert found.passes["counts"] == "traced pass"
    assert found.passes["trace_overhead"] > 0
    assert "abstained" not in found.passes
    occupancy = found.parts.metrics["forward_occupancy"]
    assert 0 < occupancy.values[0] <= 1
    assert not occupancy.exact
    for counts in found.parts.per_step.values():
        schedule = counts.streams["schedule"]
        assert schedule["h2d"] == schedule["sync"]
        assert "kernel" not in schedule, "the span of the timed pass is no kernel"
    assert {(row.stream, row.direction, row.blocking) for row in found.parts.copies} == {
        ("schedule", "h2d", True)
    }
    assert [row.status for row in found.parts.requests] == ["finished"] * 3
    assert all(row.token_ids for row in found.parts.requests)


def test_where_another_tool_counts_there_is_no_second_pass(bench):
    found = measured(bench, bench.machine, nobody, save_tokens=False, traced=False)
    assert found.parts.per_step == {} and found.parts.copies == () and found.parts.syncs == ()
    assert found.passes["abstained"] == "another tool counts"
    assert isinstance(found.outputs, Outputs)


def test_a_pass_that_was_interrupted_is_not_counted(bench):
    def interrupted():
        raise KeyboardInterrupt

    bench.scheduler.receive = interrupted
    found = measured(bench, bench.machine, nobody, save_tokens=False)
    assert found.passes["abstained"] == "the run was interrupted"
    assert found.parts.per_step == {}
    assert found.parts.copies == found.parts.syncs == ()
    assert isinstance(found.outputs, Abstained)


def test_different_tokens_leave_no_digest():
    one, other = Outputs(digest="a"), Outputs(digest="b")
    assert agreed(one, one) == one
    assert agreed(one, other) == Abstained(abstained="the timed and the traced pass gave different tokens")
    assert agreed(one, Abstained(abstained="x")) == Abstained(abstained="traced pass: x")
