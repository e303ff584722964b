"""The components that both sides of a transfer share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..link import Link
from ..memory.cache import PrefixCache
from ..observe import Observer
from ..streams import Streams
from .kv import KVGateway
from .layout import RankLayout


@dataclass(frozen=True, slots=True)
class DisaggComponents:
    layout: RankLayout
    link: Link
    port: KVGateway
    cache: PrefixCache
    streams: Streams

    def page_list(self, row: int, start: int, stop: int) -> Sequence[int]:
        """Pages of the positions [start, stop) of a row, on the host: a blocking copy, as upstream's. ``start`` is the
        first position of a page."""
        size = self.cache.page_size
        slots = self.cache.req_to_token_pool.req_to_token[row, start:stop].cpu()
        pages: list[int] = (slots[::size] // size).tolist()
        return pages

    def transfer_stream(self, observer: Observer) -> Any:
        """Create a stream for transfers and announce it."""
        stream = self.streams.module.Stream()
        observer.stream("transfer", stream)
        return stream
