"""What both sides of a transfer are given, and the stream that it has for its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..link import Link
from ..memory.cache import PrefixCache
from ..observe import Observer
from .kv import KVGateway
from .place import RankLayout


class Streams(Protocol):
    schedule: Any
    forward: Any
    copy: Any
    module: Any  # torch.cuda or its like

    def on(self, stream: Any) -> AbstractContextManager[object]: ...

    def wait(self, waiting: Any, awaited: Any) -> None: ...

    def record(self, tensor: torch.Tensor, stream: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class DisaggComponents:
    place: RankLayout
    link: Link
    port: KVGateway
    cache: PrefixCache
    streams: Streams

    def page_list(self, row: int, start: int, stop: int) -> Sequence[int]:
        """Pages that hold the positions [start, stop) of a row, on the host: a blocking copy, as upstream's. ``start``
        begins a page."""
        size = self.cache.page_size
        slots = self.cache.req_to_token_pool.req_to_token[row, start:stop].cpu()
        pages: list[int] = (slots[::size] // size).tolist()
        return pages

    def transfer_stream(self, observer: Observer) -> Any:
        """A new one."""
        stream = self.streams.module.Stream()
        observer.stream("transfer", stream)
        return stream
