"""Reading a device tensor's values is a copy that the host waits for, in every spelling."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.profiles.vgpu.conftest import Bench


@pytest.mark.parametrize(
    "look",
    [str, repr, lambda x: f"{x}", lambda x: torch.allclose(x, x)],
    ids=["str", "repr", "format", "allclose"],
)
def test_reading_values_is_a_blocking_copy(bench: Bench, look: Callable[[torch.Tensor], object]) -> None:
    x = torch.ones(3, device=bench.gpu.device)
    recorder = bench.observe(lambda: look(x))
    assert recorder.kinds.count("d2h") == 1
    assert [call.kind for call in recorder.calls].count("sync") == 1
