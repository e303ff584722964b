"""The names of the presets, apart from their shapes, which import torch."""

from __future__ import annotations

from typing import Final

PRESET_NAMES: Final = (
    *(
        "tiny-llama",
        "tiny-llama-eagle",
        "tiny-deep",
        "tiny-text-eagle",
        "tiny-qwen3",
        "tiny-cross",
        "tiny-sparse",
    ),
    *("qwen3-0.6b", "llama-3-8b", "sparse-14b", "llama-3-70b"),
)
