"""The storage of the KV cache. Allocators manage the ownership of its slots."""

from __future__ import annotations

import torch


class KVPool:
    """Keys and values of every layer, one row per slot. Page 0 is padding: it is written, never owned."""

    def __init__(
        self,
        *,
        num_layers: int,
        tokens: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.tokens = tokens
        self.page_size = page_size
        shape = (tokens + page_size, num_kv_heads, head_dim)

        # Zeros, because a masked position of the padding page is multiplied by 0 and must not be a NaN.
        def layers() -> list[torch.Tensor]:
            return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]

        self.k_cache = layers()  # per layer [slots, kv_heads, head_dim]
        self.v_cache = layers()

    @property
    def slots(self) -> int:
        return self.tokens + self.page_size
