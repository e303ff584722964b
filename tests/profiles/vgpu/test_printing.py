"""Reading a device tensor's values is a copy that the host waits for, in every spelling."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from schedbench.profiles.platform.hardware import load
from schedbench.profiles.record.timeline import Window
from schedbench.profiles.vgpu.gpu import open_vgpu


class Windows(list[Window]):
    def feed(self, window: Window) -> None:
        self.append(window)


@pytest.mark.parametrize(
    "look",
    [str, repr, lambda x: f"{x}", lambda x: torch.allclose(x, x)],
    ids=["str", "repr", "format", "allclose"],
)
def test_reading_values_is_a_blocking_copy(look: Callable[[torch.Tensor], object]) -> None:
    windows = Windows()
    with open_vgpu(load("h200"), sink=windows) as gpu:
        x = torch.ones(3, device=gpu.device)
        gpu.flush()
        windows.clear()
        look(x)
    assert [op.kind for window in windows for op in window.ops].count("d2h") == 1
    assert [call.kind for window in windows for call in window.calls].count("sync") == 1
