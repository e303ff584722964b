"""A transfer that is never made (upstream's ``fake`` backend): each worker runs as if the other were infinitely fast.

What a decode worker then reads is whatever lay in its pages, and its first token is 0: tokens mean nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..link import Link, Message
from ..request import Request
from .kv import PageTableSpan
from .messages import HANDSHAKE, KV, REQUEST, Chunk, Metadata, Preallocated
from .place import RankLayout


class FakeLink:
    """A worker's end of all its connections, of which only those to the router are real. What the other worker would
    have said is there at once."""

    def __init__(self, link: Link, place: RankLayout) -> None:
        self.rank, self.size = link.rank, link.size
        self._link = link
        self._place = place
        self._said: dict[str, deque[Any]] = {HANDSHAKE: deque(), KV: deque()}

    def send(self, to: int, tag: str, value: Any, tensors: Sequence[torch.Tensor] = ()) -> None:
        if tag not in self._said:
            self._link.send(to, tag, value, tensors)
        elif isinstance(value, Preallocated):
            self._said[KV].append(Chunk(value.id, 0, 0, (), Metadata(0, (), 0, None, None)))

    def flush(self, tag: str) -> None:
        if tag not in self._said:
            self._link.flush(tag)

    def receive(self, source: int, tag: str) -> Message:
        return self._link.receive(source, tag)

    def all_to_all(self, tag: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self._link.all_to_all(tag, tensors)

    def poll(self, tag: str) -> Message | None:
        said = self._said.get(tag)
        if said is not None:
            return Message(self.rank, said.popleft(), ()) if said else None
        message = self._link.poll(tag)
        if message is not None and tag == REQUEST and self._place.role == "prefill":
            self._accept(message.value)
        return message

    def wait(self, tags: Sequence[str], until: int | None) -> None:
        if not any(self._said.get(tag) for tag in tags):
            self._link.wait([tag for tag in tags if tag not in self._said], until)

    def gone(self) -> Mapping[int, str]:
        return self._link.gone()

    def _accept(self, req: Request | None) -> None:
        if req is not None:
            self._said[HANDSHAKE].append(Preallocated(req.id, ()))


class NoPort:
    """Takes nothing out of a pool, and puts nothing in."""

    def gather(self, slots: torch.Tensor) -> Sequence[torch.Tensor]:  # noqa: ARG002
        return ()

    def scatter(self, span: PageTableSpan, values: Sequence[torch.Tensor]) -> None: ...
