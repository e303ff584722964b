"""Opening and closing, the clock, ranges, windows, source lines."""

from __future__ import annotations

import copy
import gc
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from schedbench.profiles.platform.hardware import load
from schedbench.profiles.vgpu.gpu import open_vgpu
from schedbench.profiles.vgpu.registration import register
from schedbench.sched.kernels.declare import Work, Written, kernel
from schedbench.sched.observe import NO_STEP, SLEEP, StepInfo


def _program(gpu: Any, steps: int = 3) -> list[Any]:
    """A small overlapped loop."""
    module, observer = torch.get_device_module("vgpu"), gpu.observer
    forward, schedule = module.Stream(), module.current_stream()
    observer.stream("forward", forward)
    observer.stream("schedule", schedule)
    lens, hidden = torch.arange(8, device=gpu.device), torch.zeros(1 << 20, device=gpu.device)
    pending: list[tuple[StepInfo, torch.Tensor, Any]] = []
    seen = []

    def settle() -> None:
        info, host, done = pending.pop()
        with observer.range("settle", info.step, info.batch_size):
            done.synchronize()
            seen.append(host.tolist())
        observer.settled(info)

    for step in range(steps):
        info = StepInfo(step, "decode", batch_size=8, num_tokens=8, steady=True)
        with observer.range("prepare", step, 8):
            lens = lens + 1
        forward.wait_stream(schedule)
        with module.stream(forward):
            with observer.range("model", step, 8):
                for _ in range(4):
                    hidden.neg_()
            with observer.range("copy", step, 8):
                host = lens.to("cpu", non_blocking=True)
            done = forward.record_event()
        observer.launched(info)
        if pending:
            settle()
        pending.append((info, host, done))
    settle()
    return seen


def test_it_is_not_registered_beside_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="emulate in a process of its own"):
        register.__wrapped__()


def test_torch_is_restored_after_closing(opened: Any) -> None:
    def observed() -> list[object]:
        owners = [
            (torch, "empty"),
            (torch, "tensor"),
            (torch.Tensor, "pin_memory"),
            (torch.Tensor, "new_zeros"),
        ]
        return [getattr(owner, name) for owner, name in owners]

    with opened():  # the first one in a process registers the device's name for good
        pass
    before, own = observed(), set(vars(torch.Tensor))
    with opened():
        assert all(a is not b for a, b in zip(before, observed(), strict=True))
        assert not torch.is_grad_enabled()
    assert observed() == before and set(vars(torch.Tensor)) == own
    with pytest.raises(RuntimeError), opened():
        raise RuntimeError("within")
    assert observed() == before and set(vars(torch.Tensor)) == own
    assert torch.is_grad_enabled()


def test_virtual_gpus_can_be_open_only_one_after_the_other(opened: Any) -> None:
    with opened() as first:
        _program(first.gpu)
        with pytest.raises(RuntimeError, match="already open"), opened():
            pass
    with opened() as second:
        assert second.gpu.clock.now() == 0 and second.gpu is not first.gpu
        assert torch.ones(2, device=second.gpu.device).tolist() == [1.0, 1.0]


def test_a_tensor_of_a_closed_device_raises(opened: Any) -> None:
    with opened() as bench:
        x = torch.ones(2, device=bench.gpu.device)
    with pytest.raises(RuntimeError, match="no virtual GPU is open"):
        x + 1


def test_runs_repeat_exactly(opened: Any) -> None:
    def run() -> tuple[Any, ...]:
        with opened() as bench:
            seen = _program(bench.gpu, steps=20)
        return seen, bench.recorder.windows, bench.gpu.clock.now(), bench.gpu.sites, bench.gpu.streams

    assert run() == run()


def test_a_phase_costs_host_time_and_a_kind_of_step_may_cost_another(opened: Any, hardware: Any) -> None:
    settle = hardware.phases["settle"]
    line = {"a": settle.a.model_copy(update={"value": 7.0}), "b": settle.b.model_copy(update={"value": 2.0})}
    own = settle.model_copy(update={"kinds": {"prefill": settle.model_copy(update=line)}})
    phases = hardware.phases | {"settle": own}
    with opened(hardware=hardware.model_copy(update={"phases": phases})) as bench:
        observer, clock = bench.gpu.observer, bench.gpu.clock

        def cost(step: int, phase: str = "settle") -> int:
            """Where the range opens."""
            before = clock.now()
            with observer.range(phase, step, 10):
                return int(clock.now() - before)

        general = round(settle.a.value + 10 * settle.b.value)
        observer.planned(3, "prefill")
        observer.planned(4, "decode")
        assert [cost(3), cost(4), cost(5)] == [27, general, general]
        assert cost(3, "unheard of") == 0
        observer.planned(3, "mixed")
        assert cost(3) == general
        observer.planned(3, "prefill")
        info = StepInfo(3, "prefill", 1, 1, True)
        observer.launched(info)
        observer.settled(info)
        assert cost(3) == general


def test_ranges_name_what_happens_inside_them(bench: Any) -> None:
    """Work between two ranges belongs to the step of the first."""
    observer, x = bench.gpu.observer, torch.zeros(8, device=bench.gpu.device)

    def body() -> None:
        x.neg_()
        with observer.range("sample", 5, 2):
            with observer.range("of its own", 5, 2):
                x.abs_()
            x.exp_()
            with observer.range("prepare", 6, 2):
                x.sqrt_()
            x.sin_()
        x.cos_()
        with observer.range(SLEEP, NO_STEP, 0):
            pass
        x.tan_()

    recorder = bench.observe(body)
    assert [(op.name, op.range, op.step, op.forward) for op in recorder.ops] == [
        ("neg_", "", NO_STEP, False),
        ("abs_", "of its own", 5, True),
        ("exp_", "sample", 5, True),
        ("sqrt_", "prepare", 6, False),
        ("sin_", "sample", 5, True),
        ("cos_", "", 5, False),
        ("tan_", "", NO_STEP, False),
    ]
    assert [(r.name, r.step, r.size) for r in recorder.ranges] == [
        ("of its own", 5, 2),
        ("prepare", 6, 2),
        ("sample", 5, 2),
        (SLEEP, NO_STEP, 0),
    ]
    assert all(c.range == op.range for c, op in zip(recorder.calls, recorder.ops, strict=True))


def test_the_clock_sleeps_only_forward(bench: Any) -> None:
    clock = bench.gpu.clock
    clock.sleep_until(1_000_000)
    clock.sleep_until(500_000)
    assert clock.now() == 1_000_000


def test_windows_hold_every_record_once(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the timeline is cut, it holds the same records, each in the window in which it ended, and a forward's
    kernels in one. A window ends with the forward of its last settled step, although the next one is under way."""

    def run(steps_per_window: int) -> Any:
        monkeypatch.setattr("schedbench.profiles.vgpu.ledger.WINDOW_STEPS", steps_per_window)
        with opened() as bench:
            _program(bench.gpu, steps=50)
        return bench.recorder

    whole, cut = run(1000), run(7)
    assert len(whole.windows) == 1 and len(cut.windows) > 5
    for kind in ("ops", "calls", "ranges", "waits"):
        assert sorted(getattr(whole, kind)) == sorted(getattr(cut, kind))
    assert [i for w in cut.windows for i in w.settled] == whole.windows[0].settled
    assert [i for w in cut.windows for i in w.launched] == whole.windows[0].launched
    edges = [(w.start, w.end) for w in cut.windows]
    assert edges[0][0] == 0 and all(a[1] == b[0] for a, b in itertools.pairwise(edges))
    for window in cut.windows:
        ends = [r.end for r in (*window.ops, *window.calls, *window.ranges, *window.waits)]
        assert all(window.start <= end < window.end for end in ends)
    forwards = [{op.step for op in window.ops if op.forward} for window in cut.windows]
    assert not any(before & after for before, after in itertools.pairwise(forwards))
    assert [max(steps) for steps in forwards] == [window.settled[-1].step for window in cut.windows]


@pytest.mark.wide
def test_memory_does_not_grow() -> None:
    class Count:
        ops = 0

        def feed(self, window: Any) -> None:
            self.ops += len(window.ops)

    count = Count()
    with open_vgpu(load("h200"), sink=count) as gpu:
        x = torch.zeros(8, dtype=torch.int64, device=gpu.device)

        def launch(times: int) -> int:
            for _ in range(times):
                x.add_(1)
            gpu.flush()
            gc.collect()
            return sys.getallocatedblocks()

        few = launch(1_000)
        many = launch(100_000)
    assert count.ops == 101_001
    assert many - few < 1_000


@pytest.mark.wide
def test_without_a_sink_nothing_is_kept() -> None:
    with open_vgpu(load("h200")) as gpu:
        x = torch.zeros(8, device=gpu.device)
        for _ in range(60_000):
            x.add_(1)
        assert len(gpu.runtime.ledger.calls) < 50_000


def _two_lines(x: torch.Tensor) -> torch.Tensor:
    return torch.cat(
        [x, x],
    )


def test_calls_have_their_source_lines(bench: Any) -> None:
    x = torch.zeros(8, device=bench.gpu.device)

    def body() -> None:
        x.add_(1)
        for value in _two_lines(x).tolist():  # a compound statement is named by its first line
            assert value == 1.0
        torch.get_device_module("vgpu").synchronize()

    recorder = bench.observe(body)
    sites = bench.gpu.sites
    named = [(op.name, sites[op.site]) for op in recorder.ops]
    function = "test_calls_have_their_source_lines.<locals>.body"
    assert [(name, s.function, s.statement) for name, s in named] == [
        ("add_", function, "x.add_(1)"),
        ("cat", "_two_lines", "return torch.cat( [x, x], )"),
        (
            "Memcpy DtoH (Device -> Pageable)",
            function,
            "for value in _two_lines(x).tolist(): # a compound statement is named by its first line",
        ),
    ]
    assert all(s.file == f"vgpu/{Path(__file__).name}" for _, s in named)
    assert sites[recorder.calls[-1].site].statement == 'torch.get_device_module("vgpu").synchronize()'
    line = named[0][1].line
    assert Path(__file__).read_text().splitlines()[line - 1].strip() == "x.add_(1)"


def test_lines_outside_the_watched_folders_are_not_named(opened: Any, tmp_path: Path) -> None:
    with opened(watch=[tmp_path]) as bench:
        x = torch.zeros(8, device=bench.gpu.device)
        recorder = bench.observe(lambda: x.add_(1))
        assert [op.site for op in recorder.ops] == [-1] and not bench.gpu.sites


def test_the_scheduler_is_watched_by_default() -> None:
    with open_vgpu(load("h200")) as gpu:
        [root] = gpu.runtime.sites._watch
        assert root.name == "sched" and (root / "batch.py").exists()


@kernel(
    cost=lambda x, host, by: Work(bytes=x.nbytes, host_bytes=host.nbytes, flops=by),
    footprint=lambda: (),
)
def session_test_scale(x: Written, host: torch.Tensor, by: int) -> None:  # noqa: ARG001
    x.mul_(by)


def test_a_custom_kernel_is_one_launch_with_its_own_cost(bench: Any) -> None:
    x, pinned = torch.ones(8, device=bench.gpu.device), torch.zeros(1 << 20, pin_memory=True)
    recorder = bench.observe(lambda: session_test_scale(x, pinned, 3))
    [op] = recorder.ops
    assert (op.kind, op.name, op.host_bytes) == ("kernel", "session_test_scale", pinned.nbytes)
    assert op.end - op.start == pytest.approx(pinned.nbytes / 5.0e10 * 1e9 + 1500, abs=2)
    assert x.tolist() == [3.0] * 8


@pytest.mark.parametrize("call", [None, 30_000.0])
def test_the_call_of_a_custom_kernel_may_cost_another_time(
    opened: Any, hardware: Any, call: float | None
) -> None:
    host = hardware.host
    given = None if call is None else host.torch_call.model_copy(update={"value": call})
    host = host.model_copy(update={"kernel_call": given})
    with opened(hardware=hardware.model_copy(update={"host": host})) as bench:
        x, pinned = torch.ones(8, device=bench.gpu.device), torch.zeros(8, pin_memory=True)

        torch_call, launch = host.torch_call.value, host.launch.value
        assert bench.spent(lambda: x.add_(1)) == torch_call + launch
        assert bench.spent(lambda: session_test_scale(x, pinned, 3)) == (call or torch_call) + launch


def test_an_op_without_elements_is_no_launch(bench: Any) -> None:
    """As in torch, the call takes its time on the host only."""
    empty, before = torch.empty(0, dtype=torch.int64, device=bench.gpu.device), bench.gpu.runtime.now
    recorder = bench.observe(lambda: (-empty, empty + 1, torch.arange(3, 3, device=bench.gpu.device)))
    assert not recorder.ops and bench.gpu.runtime.now > before


@pytest.mark.parametrize("make", [lambda: torch.zeros(4), lambda: torch.zeros(2, 2)])
def test_a_custom_kernel_refuses_pageable_host_memory(bench: Any, make: Callable[[], torch.Tensor]) -> None:
    x = torch.ones(8, device=bench.gpu.device)
    with pytest.raises(RuntimeError, match="same device"):
        session_test_scale(x, make(), 3)
    session_test_scale(x, torch.zeros(0), 3)


def test_seeding_and_modules_work_on_the_device(bench: Any) -> None:
    device = bench.gpu.device

    def drawn() -> list[float]:
        torch.manual_seed(3)
        values: list[float] = torch.rand(4, device=device).tolist()
        return values

    assert drawn() == drawn()
    linear = torch.nn.Linear(4, 3, device=device)
    x = torch.ones(2, 4, device=device)
    assert copy.deepcopy(linear)(x).tolist() == linear(x).tolist()
    assert linear.weight.device == device
