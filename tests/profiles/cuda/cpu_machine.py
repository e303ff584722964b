"""torch's CPU in place of CUDA: watched as CUDA is, without streams, with a synthetic traced pass."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import torch

from schedbench.profiles.cuda.kineto import KinetoRow
from schedbench.profiles.cuda.log import WallClock
from schedbench.profiles.cuda.watch import DeviceHandle, Watch, this_thread
from schedbench.profiles.platform.machine import Machine
from schedbench.profiles.platform.resolve import Resolved
from schedbench.profiles.record.provenance import HardwarePart, Labels
from schedbench.profiles.run.runner import GatedSink, PreparedRun
from schedbench.sched.config import Capabilities

EPOCH = 10**18  # of the synthetic traces, which have no clock of their own


class Event:
    def __init__(self, *, enable_timing=False): ...

    def record(self):
        self.at = time.perf_counter_ns()

    def wait(self):
        """There are no streams to wait."""

    def synchronize(self):
        """The CPU has finished all work."""

    def elapsed_time(self, end):
        return (end.at - self.at) / 1e6


class Kineto:
    """Reports one copy to the device in every range, followed by a synchronisation."""

    def __init__(self, watch):
        self.watch = watch

    def start(self):
        self.log = self.watch().log

    def stop(self):
        watch = self.watch()
        epoch, thread = watch.clock.epoch, next(iter(this_thread()))
        return sorted(row for n, r in enumerate(watch.log.ranges) for row in _copy(n, r, epoch, thread))


def _copy(n, held, epoch, thread):
    at = epoch + held.start
    yield KinetoRow("cuda_runtime", "cudaMemcpyAsync", at, at + 2, thread, -1, 2 * n, 0, -1, -1)
    yield KinetoRow("cuda_runtime", "cudaStreamSynchronize", at + 2, at + 4, thread, -1, 2 * n + 1, 0, -1, -1)
    yield KinetoRow("cuda_sync", "Stream Sync", at + 2, at + 4, 7, 7, 2 * n + 1, 0, -1, -1)
    yield KinetoRow("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", at + 2, at + 3, 7, 7, 2 * n, 8, -1, -1)


def cpu_module(event=Event):
    """A module like ``torch.cuda``, whose classes can be replaced without others' noticing."""
    return SimpleNamespace(
        Event=type("Event", (event,), {}),
        Stream=type("Stream", (), {"synchronize": lambda _: None}),
        CUDAGraph=type("Graph", (), {"replay": lambda _: None}),
        synchronize=lambda: None,
        current_stream=lambda: 5,
    )


def identified(streams, cupti, handle):
    streams.identify(cupti, handle)
    return frozenset()


@contextmanager
def cpu_bench(resolved: Resolved) -> Iterator[PreparedRun]:
    """Opens a run that is warmed up."""
    sink = GatedSink()
    module, held = cpu_module(), []
    device = DeviceHandle(
        module=module,
        type="cuda",
        handle=lambda _: 1,
        recorder=lambda: Kineto(lambda: held[0]),
        identify=lambda streams: identified(streams, 7, 1),
    )
    nothing = Capabilities(pinned_memory=False, side_streams=False, events=False, graphs=False)
    one_epoch = patch.object(WallClock, "epoch", EPOCH)
    with one_epoch, torch.no_grad(), Watch(device, sink, inline=0).installed() as watch:
        held.append(watch)
        machine = Machine(
            device=torch.device("cpu"),
            capabilities=nothing,
            clock=watch.clock,
            observer=watch,
            names=watch,
            labels=Labels(emulated=False, host="measured"),
            hardware=HardwarePart(name="cpu"),
            flush=watch.flush,
            peek=torch.Tensor.cpu,
            environment={},
            traced=watch.traced,
            unwatched=watch.uninstalled,
        )
        bench = PreparedRun(resolved, machine, sink)
        bench.warm_up()
        yield bench
