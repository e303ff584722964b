"""The promise of a link that sends keep their tensors only until they are flushed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ...sched.link import Link, Message
from .violations import Violation


class WatchedLink:
    """The same link; counts the sends of tensors and the flushes of each tag."""

    def __init__(self, link: Link) -> None:
        self.rank, self.size = link.rank, link.size
        self._link = link
        self._sends: Counter[str] = Counter()
        self._flushed: set[str] = set()

    def unreleased(self) -> Iterator[Violation]:
        """Tags whose tensors are all kept although one send has followed another."""
        for tag, count in self._sends.items():
            if count > 1 and tag not in self._flushed:
                text = (
                    f"rank {self.rank} keeps the tensors of all {count} sends under '{tag}': none was flushed"
                )
                yield Violation("sent tensors are released", tag, text)

    def send(self, to: int, tag: str, value: Any, tensors: Sequence[torch.Tensor] = ()) -> None:
        self._sends[tag] += bool(tensors)
        self._link.send(to, tag, value, tensors)

    def flush(self, tag: str) -> None:
        self._flushed.add(tag)
        self._link.flush(tag)

    def receive(self, source: int, tag: str) -> Message:
        return self._link.receive(source, tag)

    def all_to_all(self, tag: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self._link.all_to_all(tag, tensors)

    def poll(self, tag: str) -> Message | None:
        return self._link.poll(tag)

    def wait(self, tags: Sequence[str], until: int | None) -> None:
        self._link.wait(tags, until)

    def gone(self) -> Mapping[int, str]:
        return self._link.gone()
