"""Graphs with the shape of torch.cuda's: captured once, replayed by one call of the host.

Nothing is computed during capture. Each launch adds a node with its duration and, where its values are computed, a
function that a replay calls on the captured memory. A replay is one operation per run of kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from ...sched.kernels.declare import Kernel
from ..record.timeline import OpKind
from .custom import UNKNOWN, duration
from .device import CURRENT, VirtualGpu
from .engine import COMPUTE, EventRecording, Instants, Replay, Row
from .executor import (
    Args,
    Executor,
    Kwargs,
    Operation,
    ResultSpecs,
    TensorSpec,
    allocate,
    compute_into,
    form_of,
    is_uncomputed,
    mapped,
    spec_of,
    tensors_in,
)
from .runtime import ENGINES, GraphCaptureError, Recorded, TimedByValues
from .streams import Stream, StreamContext


class Node(NamedTuple):
    kind: OpKind
    name: str
    duration: int
    size: int
    host_size: int


@dataclass(slots=True, eq=False)
class VariableNodes:
    """Nodes whose time depends on the same values, and is computed once per replay."""

    kernel: TimedByValues
    args: Args
    nodes: list[int] = field(default_factory=list)

    def cost(self, gpu: VirtualGpu) -> tuple[int, int]:
        """The time in ns, and bytes of host memory."""
        assert self.kernel.cost is not None
        if not gpu.executor.eager:
            return UNKNOWN, 0
        work = self.kernel.cost(*self.args)
        return duration(gpu.runtime.costs, work, self.args), work.host_bytes


class GraphCapture(Executor):
    """The executor and the recipient of launches while a graph is captured. ``nodes`` has the events that each replay
    records, too, and ``live`` the functions before, between and behind them."""

    def __init__(self, executor: Executor) -> None:
        super().__init__(executor.immediate)
        self.executor = executor
        self.eager = executor.eager
        self.live: list[list[Callable[[], object]]] = [[]]
        self.nodes: list[Node | Recorded] = []
        self.variables: dict[Any, VariableNodes] = {}
        self._specs = ResultSpecs()

    def node(self, kind: OpKind, name: str, duration: int, *, size: int = 0, host_size: int = 0) -> None:
        self.nodes.append(Node(kind, name, duration, size, host_size))

    def mark(self, recorded: Recorded) -> None:
        self.nodes.append(recorded)
        self.live.append([])

    def variable(self, kernel: TimedByValues, args: Args) -> None:
        # Everything that its time can depend on: the values of integer tensors, the shapes of the others.
        integers = (t.data_ptr() for t in tensors_in(args) if not t.is_floating_point())
        key = (kernel, form_of(args), *integers)
        self.variables.setdefault(key, VariableNodes(kernel, args)).nodes.append(len(self.nodes))
        self.node("kernel", kernel.name, 0)

    def empty(self, spec: TensorSpec) -> torch.Tensor:
        """Zeros, since nothing is computed yet and ops that are tried out for their shapes may use them as indices."""
        tensor = self.executor.empty(spec)
        return tensor if tensor.is_meta else tensor.zero_()

    def compute(self, op: Operation, args: Args, kwargs: Kwargs) -> Any:
        results = allocate(self._specs(op, args, kwargs), self.empty)
        self._recompute(op, args, kwargs, results)
        return results

    def mutate(self, op: Operation, args: Args, kwargs: Kwargs) -> None:
        if not is_uncomputed(args, kwargs):
            self.live[-1].append(partial(op, *args, **kwargs))

    def launch(self, kernel: Kernel, args: Args) -> Any:
        results = allocate(mapped(kernel.meta(*args), spec_of), self.empty)
        if kernel.unread_floats:
            self.live[-1].append(partial(compute_into, results, kernel.impl, args, {}))
        else:
            self._recompute(kernel.impl, args, {}, results)
        return results

    def replay(self, nodes: Iterable[Callable[[], object]]) -> None:  # noqa: ARG002
        raise GraphCaptureError("operation not permitted when stream is capturing: cudaGraphLaunch")

    def upload(self, target: torch.Tensor, source: torch.Tensor, *, pinned: bool, waits: bool) -> None:
        self.live[-1].append(partial(self.immediate.upload, target, source, pinned=pinned, waits=waits))

    def download(self, target: torch.Tensor, source: torch.Tensor, *, waits: bool) -> None:
        self.live[-1].append(partial(self.immediate.download, target, source, waits=waits))

    def read(self, op: Operation, args: Args, kwargs: Kwargs) -> Any:  # noqa: ARG002
        raise GraphCaptureError(f"operation not permitted when stream is capturing: {op.__name__}")

    def _recompute(self, op: Operation, args: Args, kwargs: Kwargs, results: Any) -> None:
        if not is_uncomputed((*args, results), kwargs):
            self.live[-1].append(partial(compute_into, results, op, args, kwargs))


class CUDAGraph:
    """A captured graph. Its results are valid until its next replay."""

    def __init__(self, keep_graph: bool = False) -> None:  # noqa: ARG002
        if not CURRENT.get().capabilities.graphs:
            raise RuntimeError("this device has no graphs")
        self._capture: GraphCapture | None = None
        self._runs: Sequence[KernelRun | Recorded] = ()

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:  # noqa: ARG002
        gpu = CURRENT.get()
        if gpu.runtime.capture is not None:
            raise GraphCaptureError("another graph is being captured")
        self._capture = gpu.executor = gpu.runtime.capture = GraphCapture(gpu.executor)
        gpu.watcher.capturing(self._capture)

    def capture_end(self) -> None:
        gpu, capture = CURRENT.get(), self._capture
        if capture is None or gpu.runtime.capture is not capture:
            raise GraphCaptureError("this graph is not being captured")
        gpu.executor, gpu.runtime.capture = capture.executor, None
        gpu.watcher.capturing(None)
        self._runs = list(_parts(capture, gpu.runtime.costs.graph_gap))

    def replay(self) -> None:
        gpu, capture = CURRENT.get(), self._capture
        if capture is None:
            raise RuntimeError("replay of a graph that was not captured")
        recordings: list[EventRecording] = []
        # Results may be inference tensors, which a graph changes in any mode.
        with gpu.watcher.replaying(capture), torch._C._InferenceMode(True):
            for k, functions in enumerate(capture.live):
                if k:
                    recordings.append(gpu.runtime.record_in_graph())
                gpu.executor.replay(functions)
        costs = [variable.cost(gpu) for variable in capture.variables.values()]
        site = gpu.runtime.graph_launch()
        stream, now = gpu.runtime.stream, gpu.runtime.now
        for run in self._runs:
            if isinstance(run, KernelRun):
                run.submit(gpu, costs, site)
            else:
                run(stream, gpu.runtime.simulation.record(stream, now, recordings.pop(0)))

    def reset(self) -> None:
        self._capture, self._runs = None, ()

    def pool(self) -> tuple[int, int]:
        return graph_pool_handle()


class KernelRun:
    """Consecutive kernels of a graph, with ``gap`` between two of them, or one of the graph's copies."""

    def __init__(self, capture: GraphCapture, part: Sequence[int], gap: int) -> None:
        self._nodes = nodes = [cast(Node, capture.nodes[k]) for k in part]
        self._gap = gap
        self._name = f"graph[{len(nodes)}]"
        self._duration = sum(node.duration for node in nodes) + gap * (len(nodes) - 1)
        self._host_size = sum(node.host_size for node in nodes)
        self._begins = np.array([0, *accumulate(node.duration + gap for node in nodes)], np.int64)
        # Of each variable that has nodes here: its place, and how many there are before each node and in all.
        self._variables: list[tuple[int, Instants]] = []
        for place, variable in enumerate(capture.variables.values()):
            own = [0, *accumulate(k in variable.nodes for k in part)]
            if own[-1]:
                self._variables.append((place, np.array(own, np.int64)))

    def submit(self, gpu: VirtualGpu, costs: Sequence[tuple[int, int]], site: int) -> None:
        """``costs`` are the present times of variable nodes, and their bytes of host memory."""
        runtime, nodes, duration = gpu.runtime, self._nodes, self._duration
        kind, name, _, size, host_size = nodes[0]
        (where, step, forward), stream, now = runtime.context, runtime.stream, runtime.now
        if kind != "kernel":
            memory = "pinned" if kind in ENGINES else ""
            row: Row = (
                kind, name, stream.id, size, host_size, memory, False, where, forward, step, site, now, 1,
            )  # fmt: skip
            engine = ENGINES.get(kind, COMPUTE)
            runtime.simulation.submit(stream, engine, now, duration, row)
            return
        host_size = self._host_size
        for place, own in self._variables:
            (time, bytes_each), count = costs[place], int(own[-1])
            duration += count * time
            host_size += count * bytes_each
        row = (
            "kernel", self._name, stream.id, 0, host_size, "", False, where, forward, step, site, now, len(nodes),
        )  # fmt: skip
        rows = self._rows(row, costs) if gpu.graph_trace == "node" else ()
        replay = Replay(partial(self._present_begins, costs), len(nodes), self._gap, row, rows)
        runtime.simulation.submit(stream, COMPUTE, now, duration, replay)

    def _present_begins(self, costs: Sequence[tuple[int, int]]) -> Instants:
        """Of each node, and of what follows the last one: from the start of the first node to its own."""
        begins = self._begins
        for place, own in self._variables:
            begins = begins + costs[place][0] * own
        return begins

    def _rows(self, whole: Row, costs: Sequence[tuple[int, int]]) -> list[Row]:
        """A row for each node."""
        sizes = [node.host_size for node in self._nodes]
        for place, own in self._variables:
            for k, (before, behind) in enumerate(pairwise(own.tolist())):
                sizes[k] = costs[place][1] if behind > before else sizes[k]
        kind, _, queue, size, _, *rest, _ = whole
        nodes = zip(self._nodes, sizes, strict=True)
        return [(kind, node.name, queue, size, host_size, *rest, 1) for node, host_size in nodes]


class graph:  # noqa: N801 - torch's name
    """Captures what is launched inside the block, after a device synchronisation, as torch does."""

    def __init__(
        self,
        cuda_graph: CUDAGraph,
        pool: Any = None,
        stream: Stream | None = None,
        capture_error_mode: str = "global",
    ) -> None:
        self._graph = cuda_graph
        self._pool = pool
        self._mode = capture_error_mode
        self._context = StreamContext(stream)

    def __enter__(self) -> None:
        CURRENT.get().runtime.synchronize_device()
        self._context.__enter__()
        self._graph.capture_begin(self._pool, self._mode)

    def __exit__(self, *raised: Any) -> None:
        self._graph.capture_end()
        if raised[0] is not None:
            self._graph.reset()
        self._context.__exit__(*raised)


def graph_pool_handle() -> tuple[int, int]:
    """All graphs share one handle, since their memory is not pooled."""
    return (0, 0)


def _parts(capture: GraphCapture, gap: int) -> Iterable[KernelRun | Recorded]:
    """Each run of kernels, each copy and each event."""
    nodes = capture.nodes
    for kernels, group in groupby(range(len(nodes)), lambda k: getattr(nodes[k], "kind", None) == "kernel"):
        members = list(group)
        for part in [members] if kernels else [[k] for k in members]:
            first = nodes[part[0]]
            yield KernelRun(capture, part, gap) if isinstance(first, Node) else first
