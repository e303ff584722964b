"""A transfer that is never made (upstream's ``fake`` backend): each worker runs as if the other were infinitely fast.

A decode worker then reads whatever its pages contain, and its first token is 0: tokens have no meaning.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..link import Link, Message
from .kv import PageTableSpan
from .layout import RankLayout
from .messages import HANDSHAKE, KV, REQUEST, Chunk, Metadata, Preallocated


class FakeLink:
    """A worker's link of which only the connections to the router are real. The messages that the other worker would
    send are available at once."""

    def __init__(self, link: Link, layout: RankLayout) -> None:
        self.rank, self.size = link.rank, link.size
        self._link = link
        self._layout = layout
        self._answers: dict[str, deque[Any]] = {HANDSHAKE: deque(), KV: deque()}

    def send(self, to: int, tag: str, value: Any, tensors: Sequence[torch.Tensor] = ()) -> None:
        if tag not in self._answers:
            self._link.send(to, tag, value, tensors)
        elif isinstance(value, Preallocated):
            self._answers[KV].append(Chunk(value.id, 0, 0, (), Metadata(0, (), 0, None, None)))

    def flush(self, tag: str) -> None:
        if tag not in self._answers:
            self._link.flush(tag)

    def receive(self, source: int, tag: str) -> Message:
        return self._link.receive(source, tag)

    def all_to_all(self, tag: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self._link.all_to_all(tag, tensors)

    def poll(self, tag: str) -> Message | None:
        answers = self._answers.get(tag)
        if answers is not None:
            return Message(self.rank, answers.popleft(), ()) if answers else None
        message = self._link.poll(tag)
        prefills = tag == REQUEST and self._layout.role == "prefill"
        if prefills and message is not None and message.value is not None:
            self._answers[HANDSHAKE].append(Preallocated(message.value.id, ()))
        return message

    def wait(self, tags: Sequence[str], until: int | None) -> None:
        if not any(self._answers.get(tag) for tag in tags):
            self._link.wait([tag for tag in tags if tag not in self._answers], until)

    def gone(self) -> Mapping[int, str]:
        return self._link.gone()


class NullPort:
    """A ``KVGateway`` that reads and writes nothing."""

    def gather(self, slots: torch.Tensor) -> Sequence[torch.Tensor]:  # noqa: ARG002
        return ()

    def scatter(self, span: PageTableSpan, values: Sequence[torch.Tensor]) -> None: ...
