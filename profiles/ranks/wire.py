"""A message between processes: the sizes of its parts, a pickled head, and bytes of its tensors.

The first frame has a fixed size, and holds all of a small message.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from .staging import SendTimes
from .transports import IncomingTensors

_FRAME: Final = 2048  # bytes
_SIZES: Final = 16  # bytes of two int64


class TensorShape(NamedTuple):
    sizes: tuple[int, ...]
    dtype: torch.dtype
    is_meta: bool  # without values


class MessageHead(NamedTuple):
    """``value`` is pickled on its own: a process that forwards it need not know its types. ``ticket`` is the
    transport's."""

    tag: str
    value: bytes
    shapes: Sequence[TensorShape] = ()
    times: SendTimes | None = None
    ticket: Any = None


class ArrivedMessage(NamedTuple):
    source: int
    head: MessageHead
    body: IncomingTensors

    def tensors(self) -> list[torch.Tensor]:
        """For the current stream."""
        return _unpacked(self.body.wait(), self.head.shapes)


def packed(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensors' bytes, one after the other, as of now on the current stream. A tensor without values has none."""
    bodies = [entry.contiguous().flatten().view(torch.uint8) for entry in values if not entry.is_meta]
    return torch.cat(bodies) if bodies else torch.empty(0, dtype=torch.uint8)


def _unpacked(body: torch.Tensor, shapes: Sequence[TensorShape]) -> list[torch.Tensor]:
    values, begin = [], 0
    for shape in shapes:
        entry = torch.empty(shape.sizes, dtype=shape.dtype, device="meta" if shape.is_meta else body.device)
        if not shape.is_meta:
            size = entry.nbytes
            entry.flatten().view(torch.uint8).copy_(body[begin : begin + size])
            begin += size
        values.append(entry)
    return values


def shapes_of(values: Sequence[torch.Tensor]) -> list[TensorShape]:
    return [TensorShape(tuple(entry.shape), entry.dtype, entry.is_meta) for entry in values]


def encoded(head: MessageHead) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(head)), dtype=torch.uint8)


def send_message(to: int, head: torch.Tensor, inline: torch.Tensor) -> None:
    """Returns when the peer has all of it. Raises RuntimeError."""
    sizes = torch.tensor([head.numel(), inline.numel()]).view(torch.uint8)
    small = _fits(head.numel(), inline.numel())
    front = torch.cat((sizes, head, inline) if small else (sizes, head))
    frame = torch.zeros(_FRAME, dtype=torch.uint8)
    begun = frame[: front.numel()].copy_(front[:_FRAME]).numel()
    rest = [front[begun:]] if small else [front[begun:], inline]
    for work in [dist.isend(part, to) for part in (frame, *rest) if part.numel()]:
        assert work is not None  # it is None only in a process outside the group
        work.wait()


def receive_message(peer: int) -> tuple[MessageHead, torch.Tensor]:
    """The next message's head and inline bytes. Raises RuntimeError, also when the peer was silent for
    torch.distributed's timeout."""
    frame = _received(_FRAME, peer)
    head_size, size = frame[:_SIZES].view(torch.int64).tolist()
    inside = frame[_SIZES : _SIZES + head_size]
    head = torch.cat((inside, _received(head_size - inside.numel(), peer)))
    end = _SIZES + head_size
    inline = frame[end : end + size] if _fits(head_size, size) else _received(size, peer)
    return pickle.loads(head.numpy().tobytes()), inline


def _fits(head: int, inline: int) -> bool:
    """Whether the first frame holds all: every part of a message wakes threads at both ends, which is its cost."""
    return _SIZES + head + inline <= _FRAME


def _received(size: int, peer: int) -> torch.Tensor:
    part = torch.empty(size, dtype=torch.uint8)
    if size:
        dist.recv(part, peer)
    return part
