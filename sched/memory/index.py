"""The indexer's keys: one small vector per token and layer, for every logical slot."""

from __future__ import annotations

import torch


class IndexPool:
    """The keys are on the device even if KV is not, because every step scores all cached tokens."""

    def __init__(
        self, *, num_layers: int, slots: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (slots, head_dim)
        self.k_cache = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
