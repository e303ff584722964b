"""Host time of the virtual GPU per op, over torch's own, and per decode step (``make bench``)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ...sched.kernels.declare import kernel, meta_like, nbytes
from ...sched.kernels.registry import Work, kernels
from ...sched.observe import StepInfo
from ..platform.hardware import load
from ..record.timeline import Window
from ..vgpu.device import VirtualGpu
from ..vgpu.gpu import Values, open_vgpu

Body = Callable[[], object]
OP_AIM, STEP_AIM = 6.0, 220.0  # microseconds


class _Count:
    """A sink that keeps nothing."""

    def __init__(self) -> None:
        self.ops = 0

    def feed(self, window: Window) -> None:
        self.ops += len(window.ops)


def figures(repeat: int = 300) -> Iterator[tuple[str, float, float]]:
    """The name, the microseconds and the aim of each figure: what the virtual GPU adds to torch's own time on the CPU,
    and a decode step. Takes some seconds."""
    torch.set_num_threads(1)
    with torch.no_grad():
        host = {name: _best(body, repeat) for name, body in _small_ops(torch.device("cpu"))}
    with _opened("real") as gpu:
        own = {name: _best(body, repeat, gpu.flush) for name, body in _small_ops(gpu.device)}
    yield from ((name, own[name] - host[name], OP_AIM) for name in own)
    with _opened("none") as gpu:
        step = _best(_decode_step(gpu, requests=50, nodes=300), 30, gpu.flush)
    yield "decode step, values none", step, STEP_AIM


@contextmanager
def _opened(values: Values) -> Iterator[VirtualGpu]:
    here = [Path(__file__)]
    with open_vgpu(load("h200"), values=values, sink=_Count(), watch=here) as gpu:
        yield gpu


def _best(body: Body, repeat: int, finish: Body = lambda: None) -> float:
    """Microseconds of this thread per call: the fastest of many short rounds, because the machine may be busy. A round
    ends with ``finish``, which makes the records of its calls."""
    rounds = []
    for _ in range(60):
        start = time.thread_time_ns()
        for _ in range(repeat):
            body()
        finish()
        rounds.append((time.thread_time_ns() - start) / repeat / 1e3)
    return min(rounds)


def _small_ops(device: torch.device) -> list[tuple[str, Body]]:
    x = torch.arange(50).to(device)
    y = torch.ones(50, dtype=torch.int64).to(device)
    index = torch.arange(0, 50, 2).to(device)
    return [
        ("add", lambda: x + y),
        ("add_", lambda: y.add_(1)),
        ("slice", lambda: x[1:9]),
        ("x[i]", lambda: x[index]),
        ("index_select", lambda: x.index_select(0, index)),
        ("cat of 2", lambda: torch.cat([x, y])),
    ]


def _decode_step(gpu: VirtualGpu, *, requests: int, nodes: int) -> Body:
    """The device calls of a steady decode step of an overlapped loop: 26 dispatches, a replay, a copy, an event."""
    module, device, observer = torch.get_device_module(gpu.device), gpu.device, gpu.observer
    n = requests
    page_table = torch.zeros(n, 4096, dtype=torch.int32, device=device)
    rows_, lens = torch.arange(n, device=device), torch.full((n,), 100, device=device)
    slots, tokens = torch.arange(n, device=device), torch.zeros(n, dtype=torch.int64, device=device)
    ring = torch.zeros(512, dtype=torch.int64, device=device)
    static = [torch.zeros(n, dtype=torch.int64, device=device) for _ in range(5)]
    replay = _captured(gpu, static[0], nodes)
    forward, copied = module.Stream(), torch.empty(n, dtype=torch.int64, pin_memory=True)
    schedule, done = module.current_stream(), module.Event()
    steps = iter(range(1 << 30))

    def step() -> None:
        i = next(steps)
        with observer.range("prepare", i, n):
            schedule.wait_stream(forward)
            page_table[rows_, lens] = slots.to(torch.int32)
            ahead = lens + 1
        forward.wait_stream(schedule)
        with module.stream(forward):
            with observer.range("resolve", i, n):
                ids = torch.where(tokens < 0, ring[tokens], tokens)
            with observer.range("model", i, n):
                for target, source in zip(static, (ids, ahead, rows_, slots, lens), strict=True):
                    target[:n].copy_(source[:n])
                replay()
            with observer.range("publish", i, n):
                ring[1 : n + 1] = static[0]
                tokens.copy_(static[1] - static[1])
            with observer.range("copy", i, n):
                copied.copy_(static[0], non_blocking=True)
                done.record()
        info = StepInfo(step=i, kind="decode", batch_size=n, num_tokens=n, steady=True)
        observer.launched(info)
        with observer.range("settle", i, n):
            done.synchronize()
            copied.tolist()
        observer.settled(info)

    return step


def _captured(gpu: VirtualGpu, ids: torch.Tensor, nodes: int) -> Callable[[], None]:
    """A graph of ``nodes`` kernels on floats, and one on integers."""
    module = torch.get_device_module(gpu.device)
    hidden = torch.zeros(ids.numel(), 64, device=gpu.device)
    layer = _layer()
    graph = module.CUDAGraph()
    with module.graph(graph):
        for _ in range(nodes):
            hidden = layer(hidden)
        ids.add_(1)
    replay: Callable[[], None] = graph.replay
    return replay


def _layer() -> Callable[[torch.Tensor], torch.Tensor]:
    name = "bench_layer"
    known = [k.op for k in kernels().values() if k.name == name]
    if known:
        return known[0]

    @kernel(meta=lambda x: meta_like(x), cost=lambda x: Work(2 * nbytes(x)), footprint=lambda: ())
    def bench_layer(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    return bench_layer
