"""How many drafts are accepted: by the target's tokens, or simulated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..config import EngineConfig, SimulatedAcceptance
from ..kernels.sampling import row_seed
from ..kernels.verify import accept_drafts, accept_simulated, simulated_lengths
from ..model.sampling_info import SamplingInfo
from ..request import Request
from .drafter import Tree


class Accepted(NamedTuple):
    places: torch.Tensor  # [b, most] int32, places among the b · d drafts, -1 behind the last
    lens: torch.Tensor  # [b] int32, how many


class TargetAcceptance:
    """Accepts the drafts that equal the target's tokens."""

    def __init__(self, most: int) -> None:
        self._most = most

    def begin(self, rows: torch.Tensor, reqs: Sequence[Request]) -> None:
        """Called when the requests in ``rows`` [b] have been prefilled."""

    def judge(self, tree: Tree, predict: torch.Tensor, rows: torch.Tensor, info: SamplingInfo) -> Accepted:  # noqa: ARG002
        """``predict`` [b · d] int64 is the target's next token behind each draft."""
        return Accepted(*accept_drafts(tree.tokens, tree.parents, predict, self._most))


class AcceptanceSimulator:
    """Draws the number of accepted drafts and overwrites the target's predictions: the tokens have no meaning."""

    def __init__(self, how: SimulatedAcceptance, config: EngineConfig, most: int) -> None:
        self._how = how
        self._most = most
        self._config = config
        self._counters = torch.zeros(config.max_running_requests + 1, dtype=torch.int64, device=config.device)
        self._verifies = 0

    def begin(self, rows: torch.Tensor, reqs: Sequence[Request]) -> None:
        """Let a request that was retracted continue its own sequence of draws."""
        had = [req.verify_ct for req in reqs]
        if any(had):
            pinned = self._config.capabilities.pinned_memory
            counts = torch.tensor(had, dtype=torch.int64, pin_memory=pinned)
            self._counters[rows] = counts.to(self._config.device, non_blocking=True)
        else:
            self._counters.index_fill_(0, rows, 0)

    def judge(self, tree: Tree, predict: torch.Tensor, rows: torch.Tensor, info: SamplingInfo) -> Accepted:  # noqa: ARG002
        how = self._how
        rounded = how.method == "multinomial"
        seeds = info.tensors.sampling_seeds
        fixed = self._fixed() if how.per == "batch" else 0
        return Accepted(
            *accept_simulated(self._counters, rows, seeds, predict, self._most, how.mean, rounded, fixed)
        )

    def _fixed(self) -> int:
        """One draw for the whole batch, keyed by the run's seed and the number of its verifies."""
        key = torch.tensor([row_seed(self._config.seed, 0)]), torch.tensor([self._verifies])
        self._verifies += 1
        drawn = simulated_lengths(*key, self._how.mean, rounded=self._how.method == "multinomial")
        return int(drawn.clamp(1, self._most))


Acceptance = TargetAcceptance | AcceptanceSimulator


def acceptance(config: EngineConfig) -> Acceptance:
    assert config.speculative is not None
    how, most = config.speculative.acceptance, config.speculative.most_accepted
    return TargetAcceptance(most) if how is None else AcceptanceSimulator(how, config, most)
