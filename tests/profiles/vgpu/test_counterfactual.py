"""One line with other times than its own: the effect on the host's clock, and unchanged values."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from schedbench.profiles.platform.hardware import load
from schedbench.profiles.vgpu.counterfactual import Counterfactual, LineChange
from schedbench.profiles.vgpu.device import CURRENT
from schedbench.profiles.vgpu.gpu import open_vgpu

HERE = Path(__file__)
HARDWARE = load("h200")
BUSY = 4096  # rows of a product that takes far longer than any call of the host


def upload(device: torch.device) -> torch.Tensor:
    return torch.tensor([1, 2], device=device)  # the line of the tests


def download(device: torch.device) -> torch.Tensor:
    return torch.arange(2, device=device).cpu()  # the line of the tests


def synchronize(device: torch.device) -> torch.Tensor:
    torch.get_device_module(device).current_stream().synchronize()  # the line of the tests
    return torch.zeros(2, dtype=torch.int64, device=device)


def poll(device: torch.device) -> torch.Tensor:
    while not torch.get_device_module(device).current_stream().query():  # the line of the tests
        pass
    return torch.zeros(2, dtype=torch.int64, device=device)


def line_of(function: Callable[[torch.device], torch.Tensor]) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(k for k, line in enumerate(lines) if "the line of the tests" in line)


def host_time(
    function: Callable[[torch.device], torch.Tensor],
    change: LineChange | None,
    *,
    line: int = 0,
    extra: int = 0,
) -> tuple[int, list[int]]:
    """Returns how long the call takes on the host after a long kernel, in ns, and its values."""
    place = (f"{HERE.parent.name}/{HERE.name}", line or line_of(function))
    changed = None if change is None else Counterfactual(*place, change, extra)
    with open_vgpu(HARDWARE, values="none", watch=[HERE.parent], counterfactual=changed) as gpu:
        runtime = CURRENT.get().runtime
        weights = torch.zeros(BUSY, BUSY, device=gpu.device)
        weights @ weights
        before = runtime.now
        found = function(gpu.device)
        return runtime.now - before, found.tolist() if found.device.type == "cpu" else found.held.tolist()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def kernel() -> int:
    """The approximate time of the long kernel, ns."""
    return host_time(synchronize, None)[0]


@pytest.mark.parametrize("function", [upload, download, synchronize, poll])
@pytest.mark.parametrize("change", ["no wait", "pinned", "absent"])
def test_a_change_removes_the_wait_and_keeps_the_values(
    function: Callable[[torch.device], torch.Tensor], change: LineChange, kernel: int
) -> None:
    plain, changed = host_time(function, None), host_time(function, change)
    waits = change == "pinned" and function in (
        synchronize,
        poll,
    )  # a line that only waits has nothing to pin
    assert plain[0] >= 0.9 * kernel
    assert changed[0] == plain[0] if waits else changed[0] < kernel / 10
    assert changed[1] == plain[1]


def test_changes_cost_their_declared_time() -> None:
    def host(change: LineChange) -> int:
        return host_time(upload, change)[0]

    calls, rest = HARDWARE.host, host("absent")  # torch's own time around the copy
    copied = calls.torch_call.value + calls.copy_call.value
    assert host("pinned") - rest == pytest.approx(copied + calls.pin_memory.value, abs=50)
    assert host("no wait") - rest == pytest.approx(copied + calls.sync_return.value, abs=50)


@pytest.mark.parametrize("change", ["no wait", "pinned", "absent", "longer"])
def test_other_lines_are_not_changed(change: LineChange) -> None:
    assert host_time(upload, change, line=1, extra=10**6) == host_time(upload, None)


def test_a_line_takes_longer_once_in_a_step() -> None:
    plain, longer = host_time(synchronize, None), host_time(synchronize, "longer", extra=10**9)
    assert longer[0] - plain[0] == pytest.approx(10**9, rel=0.1)
