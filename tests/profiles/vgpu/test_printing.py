"""Reading a device tensor's values is a copy that the host waits for, in every spelling."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from schedbench.profiles.platform.hardware import load
from schedbench.profiles.vgpu.gpu import open_vgpu
from tests.profiles.recorders import WindowRecorder


@pytest.mark.parametrize(
    "look",
    [str, repr, lambda x: f"{x}", lambda x: torch.allclose(x, x)],
    ids=["str", "repr", "format", "allclose"],
)
def test_reading_values_is_a_blocking_copy(look: Callable[[torch.Tensor], object]) -> None:
    recorder = WindowRecorder()
    with open_vgpu(load("h200"), sink=recorder) as gpu:
        x = torch.ones(3, device=gpu.device)
        gpu.flush()
        recorder.windows.clear()
        look(x)
    assert recorder.kinds.count("d2h") == 1
    assert [call.kind for call in recorder.calls].count("sync") == 1
