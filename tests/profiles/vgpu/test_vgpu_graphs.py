"""Graphs: the values and times of a replay equal those of the captured launches."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from schedbench.profiles.vgpu.runtime import GraphCaptureError
from schedbench.sched.kernels.declare import Work, kernel, meta_like

calls = {"varying": 0}


def _varying_cost(lens: torch.Tensor) -> Work:
    calls["varying"] += 1
    return Work(bytes=int(lens.sum()) * 1_000_000)


@kernel(meta=lambda x: meta_like(x), cost=_varying_cost, footprint=lambda: (), fixed_cost=False)
def graph_test_varying(lens: torch.Tensor, x: torch.Tensor, layer: int) -> torch.Tensor:
    return x * lens.sum() + layer


def capture(body: Callable[[], Any], **options: Any) -> tuple[Any, Any]:
    module = torch.get_device_module("vgpu")
    graph = module.CUDAGraph()
    with module.graph(graph, **options):
        results = body()
    return graph, results


def test_nothing_is_computed_during_capture_and_everything_at_each_replay(bench: Any) -> None:
    x = torch.ones(4, device=bench.gpu.device)

    def body() -> torch.Tensor:
        y = x * 2
        x.add_(1)
        return y[1:] + y.cumsum(0)[1:]

    graph, out = capture(body)
    assert x.tolist() == [1.0] * 4
    graph.replay()
    assert out.tolist() == [6.0, 8.0, 10.0] and x.tolist() == [2.0] * 4
    graph.replay()
    assert out.tolist() == [12.0, 16.0, 20.0]


def test_a_graph_of_inference_mode_is_replayed_outside_of_it(bench: Any) -> None:
    x = torch.ones(4, device=bench.gpu.device)
    with torch.inference_mode():
        graph, out = capture(lambda: x + 1)
    x.fill_(4)
    graph.replay()
    assert out.tolist() == [5.0] * 4


def test_several_results_and_new_tensors_are_captured(bench: Any) -> None:
    x = torch.tensor([3.0, 1.0, 2.0], device=bench.gpu.device)

    def body() -> tuple[torch.Tensor, ...]:
        values, places = x.sort()
        return (
            values,
            places,
            torch.arange(3, device=x.device) + 1,
            torch.zeros_like(x).fill_(7),
            x.to(torch.int32),
        )

    graph, out = capture(body)
    x.copy_(torch.tensor([1.0, 3.0, 2.0]))
    graph.replay()
    assert [t.tolist() for t in out] == [[1, 2, 3], [0, 2, 1], [1, 2, 3], [7, 7, 7], [1, 3, 2]]


@pytest.mark.parametrize("contended", [False, True])
def test_replay_takes_the_time_of_its_kernels(bench: Any, contended: bool) -> None:
    """Launched one by one ahead of the device, the kernels end at the same instants, except for the gap."""
    gpu = bench.gpu
    gpu.graph_trace = "node"
    module, x = torch.get_device_module("vgpu"), torch.zeros(1 << 20, device=gpu.device)
    side, y = module.Stream(), torch.zeros(1 << 16, device=gpu.device)

    def body() -> None:
        for _ in range(20):
            x.neg_()

    graph, _ = capture(body)

    def replayed() -> None:
        graph.replay()
        if contended:
            with module.stream(side):
                y.neg_()

    recorder = bench.observe(replayed)
    nodes = [op for op in recorder.ops if op.stream == 0]
    disturbing = sum(op.end - op.start for op in recorder.ops if op.stream == side.stream_id)
    kernel_ns = gpu.runtime.costs.memory(2 * x.nbytes)
    assert [op.end - op.start for op in nodes] == [kernel_ns] * 20
    gaps = [b.start - a.end for a, b in itertools.pairwise(nodes)]
    gap = gpu.runtime.costs.graph_gap
    assert sorted(gaps)[:-1] == [gap] * 18 and gaps[-1] == gap
    assert max(gaps) == max(gap, disturbing)


def test_a_replay_is_one_call_and_one_record_per_run_of_kernels(bench: Any) -> None:
    x, host = torch.zeros(4, device=bench.gpu.device), torch.ones(4, pin_memory=True)

    def body() -> None:
        x.neg_()
        x.copy_(host, non_blocking=True)
        x.add_(1)
        x.mul_(2)

    graph, _ = capture(body)
    host.fill_(5.0)
    with bench.gpu.observer.range("model", 3, 1):
        recorder = bench.observe(graph.replay)
    assert x.tolist() == [12.0] * 4
    assert [(c.kind, c.name) for c in recorder.calls] == [("graph", "cudaGraphLaunch")]
    seen = [
        (op.kind, op.name, op.bytes, op.host_memory, op.range, op.forward, op.step) for op in recorder.ops
    ]
    assert [op.kernels for op in recorder.ops] == [1, 1, 2]
    assert seen == [
        ("kernel", "graph[1]", 0, "", "model", True, 3),
        ("h2d", "Memcpy HtoD (Pinned -> Device)", 16, "pinned", "model", True, 3),
        ("kernel", "graph[2]", 0, "", "model", True, 3),
    ]


def test_a_varying_cost_is_that_of_the_values_at_the_replay(bench: Any) -> None:
    device = bench.gpu.device
    lens, x = torch.tensor([1, 2], device=device), torch.ones(2, device=device)

    def body() -> torch.Tensor:
        hidden = x
        for layer in range(4):
            hidden = graph_test_varying(lens, hidden, layer)
        return hidden

    graph, out = capture(body)
    calls["varying"] = 0
    short = bench.observe(graph.replay).ops[0]
    assert calls["varying"] == 4
    lens.add_(100)
    long = bench.observe(graph.replay).ops[0]
    longer = (long.end - long.start) - (short.end - short.start)
    assert longer == pytest.approx(4 * 200e6 / 4.3e12 * 1e9, abs=10)
    assert out.tolist() == pytest.approx([(((203 + 0) * 203 + 1) * 203 + 2) * 203 + 3] * 2)


def test_equal_kernels_share_one_cost(bench: Any) -> None:
    device = bench.gpu.device
    lens, x = torch.tensor([1, 2], device=device), torch.ones(2, device=device)
    graph, _ = capture(lambda: [graph_test_varying(lens, x + k, 0) for k in range(5)])
    calls["varying"] = 0
    graph.replay()
    assert calls["varying"] == 1


@pytest.mark.parametrize(
    "expression",
    [
        "x.sum().item()",
        "x.cpu()",
        "x[x > 0]",
        "torch.ones(4).to(x.device)",
        "module.synchronize()",
        "g.replay()",
    ],
)
def test_waits_cannot_be_captured(bench: Any, expression: str) -> None:
    x, module = torch.ones(4, device=bench.gpu.device), torch.get_device_module("vgpu")
    g, _ = capture(lambda: x.neg_())
    with pytest.raises(GraphCaptureError, match="not permitted when stream is capturing"):
        capture(lambda: eval(expression, {"x": x, "torch": torch, "module": module, "g": g}))
    assert (x + 1).sum().item() == 8.0, "the device works on after a failed capture"


def test_events_within_a_capture_are_allowed(bench: Any) -> None:
    module, x = torch.get_device_module("vgpu"), torch.ones(4, device=bench.gpu.device)
    side = module.Stream()

    def body() -> None:
        side.wait_stream(module.current_stream())
        with module.stream(side):
            x.neg_()
        module.current_stream().wait_stream(side)

    graph, _ = capture(body, pool=module.graph_pool_handle(), stream=module.Stream())
    graph.replay()
    assert x.tolist() == [-1.0] * 4


def test_an_external_event_is_recorded_by_each_replay(bench: Any) -> None:
    module, x = torch.get_device_module("vgpu"), torch.ones(4, device=bench.gpu.device)
    start, middle, end = (
        module.Event(enable_timing=True, external=external) for external in (False, True, False)
    )

    def body() -> None:
        x.neg_()
        middle.record()
        x.add_(1)

    graph, _ = capture(body)
    for _ in range(2):
        start.record()
        graph.replay()
        end.record()
        module.synchronize()
        assert 0 < start.elapsed_time(middle) < start.elapsed_time(end)
    with pytest.raises(GraphCaptureError, match="external event"):
        capture(middle.wait)


def test_a_graph_that_was_not_captured_cannot_be_replayed(bench: Any) -> None:  # noqa: ARG001
    graph = torch.get_device_module("vgpu").CUDAGraph()
    with pytest.raises(RuntimeError, match="not captured"):
        graph.replay()


def test_without_values_the_integers_of_a_graph_are_computed(bench_none: Any) -> None:
    device = bench_none.gpu.device
    hidden, lens = torch.zeros(2, 1 << 20, device=device), torch.tensor([1, 2], device=device)

    def body() -> tuple[torch.Tensor, torch.Tensor]:
        for _ in range(3):
            hidden.neg_()
        return lens + 1, hidden * 2

    graph, (ahead, doubled) = capture(body)
    lens.add_(10)
    recorder = bench_none.observe(graph.replay)
    assert ahead.tolist() == [12, 13]
    assert doubled.shape == (2, 1 << 20)
    kernels = 4 * bench_none.gpu.runtime.costs.memory(2 * hidden.nbytes)
    assert recorder.ops[0].end - recorder.ops[0].start > kernels


def _moved_cost(counts: torch.Tensor) -> Work:
    return Work(bytes=0, host_bytes=int(counts.sum()))


@kernel(cost=_moved_cost, footprint=lambda: (), fixed_cost=False)
def graph_test_moved(counts: torch.Tensor) -> None:
    """Reads as many bytes from the host as ``counts`` gives."""


@pytest.mark.parametrize("trace", ["graph", "node"])
def test_bytes_moved_by_a_replay_follow_from_its_values(opened: Any, trace: str) -> None:
    with opened(graph_trace=trace) as bench:
        counts = torch.tensor([3, 4], device=bench.gpu.device)
        graph, _ = capture(lambda: [counts.add_(1), graph_test_moved(counts), graph_test_moved(counts)])

        def replay() -> None:
            graph.replay()
            graph.replay()

        ops = bench.observe(replay).ops
    sizes = [op.host_bytes for op in ops]
    assert sizes == ([18, 22] if trace == "graph" else [0, 9, 9, 0, 11, 11])
