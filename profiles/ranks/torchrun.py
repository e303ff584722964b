"""What torchrun sets in the environment of the processes that it starts.

Clusters set variables of the same names for other purposes. Without TORCHELASTIC_RUN_ID, which torchrun always sets,
none of them is read; with it, all are checked.
"""

from __future__ import annotations

import os
from typing import Final, NamedTuple

import torch.distributed as dist

_MAX_PROCESSES: Final = 2**16
_MAX_PORT: Final = 2**16 - 1


class TorchrunError(ValueError):
    """A variable by which torchrun describes a process is missing or invalid."""

    def __init__(self, name: str, wanted: str, found: str) -> None:
        super().__init__(
            f"{name} in the environment: expected {wanted}, got {ascii(found) if found else 'nothing'};"
            " torchrun's variables are read because TORCHELASTIC_RUN_ID is set"
        )


class ProcessAddress(NamedTuple):
    """A process among others, and where they meet."""

    rank: int
    size: int
    host: str
    port: int


def launched() -> ProcessAddress | None:
    """This process's address where torchrun started it. Raises TorchrunError."""
    if not dist.is_torchelastic_launched():
        return None
    size = _number("WORLD_SIZE", 1, _MAX_PROCESSES)
    return ProcessAddress(
        _number("RANK", 0, size - 1),
        size,
        _text("MASTER_ADDR"),
        _number("MASTER_PORT", 1, _MAX_PORT),
    )


def local_rank(rank: int) -> int:
    """The number of a rank among those of its machine; all are on one unless torchrun started them.
    Raises TorchrunError."""
    return _number("LOCAL_RANK", 0, _MAX_PROCESSES) if dist.is_torchelastic_launched() else rank


def _number(name: str, low: int, high: int) -> int:
    text = _text(name)
    if not (text.isascii() and text.isdigit() and len(text) < 9 and low <= int(text) <= high):
        raise TorchrunError(name, f"a whole number from {low} to {high}", text)
    return int(text)


def _text(name: str) -> str:
    text = os.environ.get(name, "")
    if not text:
        raise TorchrunError(name, "a value", "")
    return text
