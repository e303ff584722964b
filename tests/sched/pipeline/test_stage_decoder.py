"""What a pipeline's stage computes its layers from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from schedbench.sched.batch import ForwardBatch, ForwardMode
from schedbench.sched.model.decoder import Decoder
from schedbench.sched.pipeline import StageDecoder

IDS, TABLE = torch.tensor([2, 0]), torch.arange(6.0).view(3, 2)
PROXIES = (torch.full((2, 2), 7.0), torch.full((2, 2), 8.0))


@pytest.mark.parametrize("is_first", [True, False])
def test_only_later_stages_take_the_proxies_of_a_batch(is_first: bool) -> None:
    """An engine's graph hands static proxies to its first stage, too."""
    taken: list[Any] = []

    class Recorder(Decoder):
        def through(self, hidden: Any, residual: Any, batch: object, layers: object = None) -> Any:  # noqa: ARG002
            taken.extend([hidden, residual])
            return residual

    config: Any = SimpleNamespace(dtype=torch.float32)
    weights: Any = SimpleNamespace(embedding=TABLE, layers=(None,))
    stage: Any = SimpleNamespace(is_first=is_first, is_last=False)
    kv: Any = None
    decoder = Recorder(config, weights, kv=kv, req_to_token=TABLE)
    batch = ForwardBatch(ForwardMode.DECODE, *[IDS] * 5, max_seq_len=1, proxies=PROXIES)
    output = StageDecoder(decoder, stage).forward(batch)
    if is_first:
        assert taken[0] is None and taken[1].tolist() == TABLE[IDS].tolist()
    else:
        assert taken[0] is PROXIES[0] and taken[1] is PROXIES[1]
    assert all(sent is taken[1] for sent in output.proxies) and len(output.proxies) == 2
