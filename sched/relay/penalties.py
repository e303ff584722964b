"""Which tokens the penalties have counted when a step samples."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from ..batch import ScheduleBatch
from ..request import Request
from .context import RelayContext

if TYPE_CHECKING:
    from ..model.penalties import PenalizerOrchestrator
    from ..model.sampling import SamplingInfo

Latest = Callable[[RelayContext, ScheduleBatch], "torch.Tensor"]


class PenaltyTokens:
    """When and with which tokens penalties are counted. The hooks do nothing unless a subclass says otherwise."""

    exact: bool  # promises the same tokens in every loop

    def before_decode(self, batch: ScheduleBatch, info: SamplingInfo) -> None:
        """Called on the schedule stream while a decode is prepared."""

    def before_rows_change(self, info: SamplingInfo) -> None:
        """Called on the schedule stream before rows of ``info`` are taken or appended."""

    def after_sampling(self, info: SamplingInfo, token_ids: torch.Tensor) -> None:
        """Called on the stream that sampled; ``info`` is what it sampled with."""


class BeforeDecode(PenaltyTokens):
    """Upstream's rule: while a decode is prepared, count the ``latest`` token of each request."""

    exact = False

    def __init__(self, latest: Latest, context: RelayContext) -> None:
        self._latest = partial(latest, context)

    def before_decode(self, batch: ScheduleBatch, info: SamplingInfo) -> None:
        orchestrator = _required(info)
        if orchestrator is not None:
            orchestrator.cumulate_output_tokens(self._latest(batch))


class AfterSampling(PenaltyTokens):
    """Count each token where it is sampled, so that in both loops every step has counted all tokens before it."""

    exact = True

    def __init__(self, context: RelayContext) -> None:
        self._streams = context.streams

    def before_rows_change(self, info: SamplingInfo) -> None:
        """Wait for the forward, which counts into the state that rows are taken from."""
        if _required(info) is not None:
            self._streams.wait(self._streams.schedule, self._streams.forward)

    def after_sampling(self, info: SamplingInfo, token_ids: torch.Tensor) -> None:
        orchestrator = _required(info)
        if orchestrator is not None:
            orchestrator.cumulate_output_tokens(token_ids)


def known_to_the_host(context: RelayContext, batch: ScheduleBatch) -> torch.Tensor:
    """Upload each request's last token on the host. Under overlap that is one token behind, and a request's first
    decode counts its last prompt token, as upstream does."""
    return torch.tensor(
        [_last_known_token(req) for req in batch.reqs], dtype=torch.int64, device=context.device
    )


def output_of_the_batch(context: RelayContext, batch: ScheduleBatch) -> torch.Tensor:
    """The tokens that the serial loop's last step left on the device (before #25774)."""
    assert batch.output_ids is not None
    return batch.output_ids.to(torch.int64)


def input_of_the_batch(context: RelayContext, batch: ScheduleBatch) -> torch.Tensor:
    """The same tokens, as the next input (#25774 to #25945)."""
    assert batch.input_ids is not None, (
        f"step {batch.step}: the batch whose tokens are to be counted has no input ids"
    )
    return batch.input_ids


def bonus_of_the_batch(context: RelayContext, batch: ScheduleBatch) -> torch.Tensor:
    """The last token of each request that the serial worker has accepted."""
    return batch.draft_input.bonus_tokens


from_bonus = partial(BeforeDecode, bonus_of_the_batch)
from_requests = partial(BeforeDecode, known_to_the_host)
from_output = partial(BeforeDecode, output_of_the_batch)
from_input = partial(BeforeDecode, input_of_the_batch)


def _required(info: SamplingInfo) -> PenalizerOrchestrator | None:
    orchestrator = info.penalizer_orchestrator
    return orchestrator if orchestrator is not None and orchestrator.is_required else None


def _last_known_token(req: Request) -> int:
    return req.output_ids[-1] if req.output_ids else req.origin_input_ids[-1]
