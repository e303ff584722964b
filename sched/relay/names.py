"""The names of the relay's states and switches, apart from their policies, which import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

SWITCH_NAMES: Final = {
    *("backup_indices", "barrier", "dead_publish", "flatten", "index"),
    *("penalties", "preparation", "sampling_tensors", "seq_lens_cpu", "staging"),
}

STATE_NAMES: Final = (
    *("pr25774-before", "pr25774", "pr25944-before", "pr25944", "pr26020", "pr26425-before", "pr26425"),
    *("pr25945-before", "pr25945", "latest"),
)
ALIASES: Final[Mapping[str, str]] = {"pr26020-before": "pr25944"}
