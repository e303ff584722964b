"""One MLP shared by all data-parallel ranks: a rank without work has to take part in every step.

Each rank has some output columns of both products, and computes them for the rows of all ranks::

    rank 0   its rows [t0, hidden] -+- all rows -- gate, up -- its columns -+- all columns -- down -- its columns -+
    rank 1   its rows [t1, hidden] -+                                       +                                      +
                                                        all ranks' columns of its own rows [t, hidden] for each -+

An output element is one complete dot product on whichever rank computes it, so results equal those of one rank bit for
bit. All waiting for other ranks is on the forward stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from ..batch import ForwardBatch
from ..kernels.dense import linear_columns, silu_and_mul
from ..link import Link
from ..model.config import ModelConfig
from ..model.weights import LayerWeights, Weights
from .sync import RankShare

ROWS, COLUMNS, OWN = "mlp rows", "mlp columns", "mlp own rows"
WIDTH = 16  # columns of a block, which is not split


class SharedMLP:
    """The MLP of layers whose weights ``sharded`` has made. All ranks call it for each layer, in the same order."""

    def __init__(self, link: Link, config: ModelConfig, share: RankShare) -> None:
        self._link = link
        self._ranks = share.ranks
        self._inner, self._outer = _columns(config, share)
        self._widths = 2 * config.intermediate_size, config.hidden_size

    def __call__(self, hidden: torch.Tensor, layer: LayerWeights, batch: ForwardBatch) -> torch.Tensor:
        """The output [T, hidden] for this rank's rows [T, hidden]; T may be 0."""
        rows = torch.cat(self._link.all_to_all(ROWS, [hidden] * self._ranks))
        gated = linear_columns(rows, layer.gate_up, self._inner, self._widths[0], hidden.dtype)
        inner = torch.cat(self._link.all_to_all(COLUMNS, [silu_and_mul(gated)] * self._ranks), 1)
        columns = linear_columns(inner, layer.down, self._outer, self._widths[1], hidden.dtype)
        return torch.cat(self._link.all_to_all(OWN, columns.split(batch.global_num_tokens)), 1)


def sharded(weights: Weights, config: ModelConfig, share: RankShare) -> Weights:
    """``weights`` with only this rank's columns of every MLP."""
    inner, outer = _columns(config, share)
    layers = tuple(
        replace(layer, gate_up=_select(layer.gate_up, inner), down=_select(layer.down, outer))
        for layer in weights.layers
    )
    return replace(weights, layers=layers)


def _columns(config: ModelConfig, share: RankShare) -> tuple[list[int], list[int]]:
    """The begin and end of this rank's columns: of gate and of up, which are adjacent; of down."""
    width = config.intermediate_size
    inner = split_columns(width, share.ranks)[share.rank]
    outer = split_columns(config.hidden_size, share.ranks)[share.rank]
    return [inner.start, inner.stop, width + inner.start, width + inner.stop], [outer.start, outer.stop]


def _select(weight: torch.Tensor, columns: Sequence[int]) -> torch.Tensor:
    runs = zip(columns[::2], columns[1::2], strict=True)
    return torch.cat([weight[:, start:stop] for start, stop in runs], 1)


def most_ranks(config: ModelConfig) -> int:
    """The most ranks that can have a block of columns each."""
    return min(config.intermediate_size, config.hidden_size) // WIDTH


def split_columns(width: int, ranks: int) -> Sequence[range]:
    """Nearly equal shares of whole blocks; the last one may be shorter."""
    blocks = -(-width // WIDTH)
    edges = [min(width, WIDTH * (blocks * rank // ranks)) for rank in range(ranks + 1)]
    return [range(start, stop) for start, stop in pairwise(edges)]
