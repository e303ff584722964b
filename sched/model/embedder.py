"""A decoder that embeds prompts."""

from __future__ import annotations

import torch

from .decoder import Decoder


class Embedder(Decoder):
    """Returns each request's last hidden state [b, hidden], after the final norm, in place of logits.

    It does not pool over tokens, project, or scale to unit length: that would change no copy and no order."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden
