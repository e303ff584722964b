"""The names of the relay's switches, apart from their policies, which import torch."""

from __future__ import annotations

from typing import Final

SWITCH_NAMES: Final = {
    *("backup_indices", "barrier", "dead_publish", "flatten", "index"),
    *("penalties", "preparation", "sampling_tensors", "seq_lens_cpu", "staging"),
}
