"""Which requests are retracted when KV runs out, and how admission becomes more conservative afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..request import Request

INIT_RATIO = 0.7
MIN_RATIO_FACTOR = 0.14
DECAY_STEPS = 600
RETRACT_DECODE_STEPS = (
    20  # tokens that each remaining request should be able to add before the next retraction
)


@dataclass(slots=True)
class NewTokenRatio:
    """The share of their output limits that running requests are expected to use: falls with every decode and rises
    after a retraction (upstream ``new_token_ratio``)."""

    conservativeness: float
    value: float = 0.0

    def __post_init__(self) -> None:
        self.reset()

    @property
    def _initial(self) -> float:
        return min(INIT_RATIO * self.conservativeness, 1.0)

    def reset(self) -> None:
        self.value = self._initial

    def decay(self) -> None:
        floor = self._initial * MIN_RATIO_FACTOR
        self.value = max(self.value - (self._initial - floor) / DECAY_STEPS, floor)

    def after_retraction(self, remaining: Sequence[Request]) -> None:
        decoded = sum(len(req.output_ids) for req in remaining)
        limit = sum(req.sampling.max_new_tokens for req in remaining)
        self.value = min(1.0, (decoded + RETRACT_DECODE_STEPS * len(remaining)) / (limit + 1))


def retraction_order(reqs: Sequence[Request]) -> list[int]:
    """Indices of a batch in the order in which requests are kept. Retraction takes them from the end: the request with
    the fewest output tokens first, and among equals the one with the longest prompt first."""
    return sorted(
        range(len(reqs)),
        key=lambda i: (len(reqs[i].output_ids), -len(reqs[i].origin_input_ids)),
        reverse=True,
    )
