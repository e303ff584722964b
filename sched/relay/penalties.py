"""Which tokens the penalties have seen when a step samples: ``penalty_tokens``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..batch import ScheduleBatch
from .desk import Desk

if TYPE_CHECKING:
    from ..model.sampling_info import SamplingInfo
    from ..request import Request


class FromRequests:
    """Upstream's rule: before a decode, upload the last token that each request is known to have. Under overlap that
    is one token behind, and a request's first decode counts its last prompt token (upstream-faithful)."""

    exact = False

    def __init__(self, desk: Desk) -> None:
        self._device = desk.device

    def before_decode(self, batch: ScheduleBatch, info: SamplingInfo) -> None:
        if info.penalizer_orchestrator is None or not info.penalizer_orchestrator.is_required:
            return
        latest = [_last_known_token(req) for req in batch.reqs]
        info.penalizer_orchestrator.cumulate_output_tokens(
            torch.tensor(latest, dtype=torch.int64, device=self._device)
        )

    def after_sampling(self, info: SamplingInfo, token_ids: torch.Tensor) -> None: ...


class OnDevice:
    """Count each token where it is sampled: every step has seen all tokens before it, in both loops."""

    exact = True

    def __init__(self, desk: Desk) -> None: ...

    def before_decode(self, batch: ScheduleBatch, info: SamplingInfo) -> None: ...

    def after_sampling(self, info: SamplingInfo, token_ids: torch.Tensor) -> None:
        if info.penalizer_orchestrator is not None and info.penalizer_orchestrator.is_required:
            info.penalizer_orchestrator.cumulate_output_tokens(token_ids)


def _last_known_token(req: Request) -> int:
    return req.output_ids[-1] if req.output_ids else req.origin_input_ids[-1]
