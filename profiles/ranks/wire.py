"""A message between processes: the sizes of its parts, a head, and bytes of its tensors.

The first frame has a fixed size, and holds all of a small message. The head is read by the types that are declared for
its tag, so that no message can run code of its sender's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from .codec import MalformedMessageError, encode, parse, reader
from .staging import SendTimes
from .transports import IncomingTensors

_FRAME: Final = 2048  # bytes
_SIZES: Final = 16  # bytes of two int64
_MOST_HEAD: Final = 1 << 32  # bytes: a report of millions of requests has fewer


class TensorShape(NamedTuple):
    sizes: tuple[int, ...]
    dtype: torch.dtype
    is_meta: bool  # without values

    @property
    def nbytes(self) -> int:
        """Of the values that are sent."""
        return 0 if self.is_meta else math.prod(self.sizes) * self.dtype.itemsize


class MessageHead(NamedTuple):
    """``ticket`` is the transport's."""

    tag: str
    value: Any
    shapes: Sequence[TensorShape] = ()
    times: SendTimes | None = None
    ticket: Any = None


class MessageFormat:
    """Heads as bytes and back. ``values``: the type of the value by tag; ``ticket``: the type of tickets."""

    def __init__(self, values: Mapping[str, Any], ticket: Any) -> None:
        self._readers = {tag: reader(hint) for tag, hint in values.items()}
        self._rest = reader(tuple[Sequence[TensorShape], SendTimes | None, ticket])

    def encoded(self, head: MessageHead) -> torch.Tensor:
        """Raises KeyError for a tag without a type."""
        assert head.tag in self._readers, f"no type is declared for the tag '{head.tag}'"
        return torch.frombuffer(bytearray(encode([*head])), dtype=torch.uint8)

    def decoded(self, content: bytes) -> MessageHead:
        """Raises MalformedMessageError."""
        match parse(content):
            case [str(tag), value, *rest] if tag in self._readers:
                try:
                    head = MessageHead(tag, self._readers[tag](value), *self._rest(rest))
                except MalformedMessageError as error:
                    raise MalformedMessageError(f"'{tag}': {error}") from None
            case [str(tag), *_]:
                raise MalformedMessageError(f"no type is declared for the tag {tag[:40]!a}")
            case _:
                raise MalformedMessageError("a head is a list that begins with a tag")
        if any(size < 0 for shape in head.shapes for size in shape.sizes):
            raise MalformedMessageError(f"'{tag}': a tensor with a negative size")
        return head


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
    parts = body.split([shape.nbytes for shape in shapes])
    return [
        torch.empty(shape.sizes, dtype=shape.dtype, device="meta")
        if shape.is_meta
        else part.clone().view(shape.dtype).view(shape.sizes)
        for shape, part in zip(shapes, parts, strict=True)
    ]


def shapes_of(values: Sequence[torch.Tensor]) -> list[TensorShape]:
    return [TensorShape(tuple(entry.shape), entry.dtype, entry.is_meta) for entry in values]


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


def receive_message(peer: int, form: MessageFormat) -> tuple[MessageHead, torch.Tensor]:
    """The next message's head and inline bytes. Raises MalformedMessageError; RuntimeError, also when the peer was
    silent for torch.distributed's timeout."""
    frame = _received(_FRAME, peer)
    head_size, size = frame[:_SIZES].view(torch.int64).tolist()
    if not 0 <= head_size <= _MOST_HEAD:
        raise MalformedMessageError(f"a head of {head_size} bytes")
    inside = frame[_SIZES : _SIZES + head_size]
    head = form.decoded(torch.cat((inside, _received(head_size - inside.numel(), peer))).numpy().tobytes())
    announced = sum(shape.nbytes for shape in head.shapes) if head.ticket is None else 0
    if size != announced:
        raise MalformedMessageError(f"'{head.tag}': {size} bytes of tensors that have {announced}")
    end = _SIZES + head_size
    return head, frame[end : end + size] if _fits(head_size, size) else _received(size, peer)


def _fits(head: int, inline: int) -> bool:
    """Whether the first frame holds all: every part of a message wakes threads at both ends, which is its cost."""
    return _SIZES + head + inline <= _FRAME


def _received(size: int, peer: int) -> torch.Tensor:
    part = torch.empty(size, dtype=torch.uint8)
    if size:
        dist.recv(part, peer)
    return part
