"""What a pipeline's stage computes its layers from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from schedbench.sched.pipeline import StageDecoder

IDS, TABLE = torch.tensor([2, 0]), torch.arange(6.0).view(3, 2)
PROXIES = (torch.full((2, 2), 7.0), torch.full((2, 2), 8.0))


@pytest.mark.parametrize("is_first", [True, False])
def test_only_later_stages_take_the_proxies_of_a_batch(is_first: bool) -> None:
    """An engine's graph hands static proxies to its first stage, too."""
    taken: list[Any] = []

    def through(before: Any, residual: torch.Tensor, _: object) -> torch.Tensor:
        taken.extend([before, residual])
        return residual

    decoder: Any = SimpleNamespace(weights=SimpleNamespace(embedding=TABLE), through=through)
    stage: Any = SimpleNamespace(is_first=is_first, is_last=False)
    batch: Any = SimpleNamespace(input_ids=IDS, proxies=PROXIES)
    StageDecoder(decoder, stage).forward(batch)
    if is_first:
        assert taken[0] is None and taken[1].tolist() == TABLE[IDS].tolist()
    else:
        assert taken[0] is PROXIES[0] and taken[1] is PROXIES[1]
