"""A message between processes: the sizes of what follows, a pickled head, and what goes along of the tensors' bytes.

The first frame has a fixed size, and all of a small message.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from .carriers import TensorMessage
from .ports import Stamp

_FRAME: Final = 2048  # bytes
_SIZES: Final = 16  # bytes of two int64


class Head(NamedTuple):
    """``value`` is pickled once more, since who passes it on need not know its types. ``told`` is the carrier's."""

    tag: str
    value: bytes
    shapes: Sequence[tuple[tuple[int, ...], torch.dtype, bool]]  # and whether there are no values
    stamp: Stamp | None
    told: Any


class Arrived(NamedTuple):
    source: int
    head: Head
    parcel: TensorMessage

    def tensors(self) -> list[torch.Tensor]:
        """For the current stream."""
        return _unpacked(self.parcel.opened(), self.head.shapes)


def packed(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Their bytes as of now on the current stream, one after the other. What has no values has no bytes."""
    bodies = [entry.contiguous().flatten().view(torch.uint8) for entry in values if not entry.is_meta]
    return torch.cat(bodies) if bodies else torch.empty(0, dtype=torch.uint8)


def shapes(values: Sequence[torch.Tensor]) -> list[tuple[tuple[int, ...], torch.dtype, bool]]:
    return [(tuple(entry.shape), entry.dtype, entry.is_meta) for entry in values]


def speak(to: int, head: torch.Tensor, along: torch.Tensor) -> None:
    """Until the peer has all of it. Raises RuntimeError."""
    sizes = torch.tensor([head.numel(), along.numel()]).view(torch.uint8)
    small = _fits(head.numel(), along.numel())
    front = torch.cat((sizes, head, along) if small else (sizes, head))
    frame = torch.zeros(_FRAME, dtype=torch.uint8)
    begun = frame[: front.numel()].copy_(front[:_FRAME]).numel()
    rest = [front[begun:]] if small else [front[begun:], along]
    for work in [dist.isend(part, to) for part in (frame, *rest) if part.numel()]:
        assert work is not None  # it is, where this process is none of the group
        work.wait()


def hear(peer: int) -> tuple[Head, torch.Tensor]:
    """Raises RuntimeError, also when it has been silent for torch.distributed's timeout."""
    frame = _received(_FRAME, peer)
    head_size, size = frame[:_SIZES].view(torch.int64).tolist()
    inside = frame[_SIZES : _SIZES + head_size]
    head = torch.cat((inside, _received(head_size - inside.numel(), peer)))
    end = _SIZES + head_size
    along = frame[end : end + size] if _fits(head_size, size) else _received(size, peer)
    return pickle.loads(head.numpy().tobytes()), along


def _fits(head: int, along: int) -> bool:
    """Whether the first frame has all: every part of a message wakes threads at both ends, which is what it costs."""
    return _SIZES + head + along <= _FRAME


def _received(size: int, peer: int) -> torch.Tensor:
    part = torch.empty(size, dtype=torch.uint8)
    if size:
        dist.recv(part, peer)
    return part


def written(head: Head) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(head)), dtype=torch.uint8)


def _unpacked(
    body: torch.Tensor, shapes: Sequence[tuple[tuple[int, ...], torch.dtype, bool]]
) -> list[torch.Tensor]:
    values, begin = [], 0
    for shape, dtype, is_meta in shapes:
        entry = torch.empty(shape, dtype=dtype, device="meta" if is_meta else body.device)
        if not is_meta:
            size = entry.nbytes
            entry.flatten().view(torch.uint8).copy_(body[begin : begin + size])
            begin += size
        values.append(entry)
    return values
