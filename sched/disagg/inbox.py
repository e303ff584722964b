"""The decode worker's side of a transfer (upstream ``DecodePreallocQueue`` and ``DecodeTransferQueue``).

queued        until there is room for the prompt, in order of arrival
transferring  a row and slots are its own, KV comes in
ready         all of it has come: it decodes with the next batch
parked        retracted: its KV lies in the host's memory until there is room again
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from ..memory.allocation import alloc_for_extend, evict_from_tree_cache
from ..observe import Observer
from ..request import Request
from .kv import PageTableSpan
from .messages import HANDSHAKE, KV, Chunk, Dropped, Failed, Metadata, Preallocated
from .parts import DisaggComponents
from .requests import lost

CLIP_MAX_NEW_TOKENS = 4096  # nobody is expected to need more


@dataclass(slots=True)
class _Receiver:
    req: Request
    slots: torch.Tensor  # [prompt] int64
    pieces: dict[int, int] = field(default_factory=dict)  # chunks that have come: start to stop
    last: Chunk | None = None  # the one with the metadata
    failed: str = ""  # why no more will come

    @property
    def metadata(self) -> Metadata | None:
        """Once all has come."""
        there = sum(stop - start for start, stop in self.pieces.items())
        return self.last.metadata if self.last is not None and self.last.stop == there else None


@dataclass(slots=True)
class _Parked:
    req: Request
    draft: tuple[torch.Tensor, ...]
    values: Sequence[torch.Tensor]  # of the host, as the port gathered them


@dataclass(slots=True)
class Ready:
    """``arrived``: event behind which the KV may be read; ``metadata`` of a request that comes for the first time;
    ``draft``: where it speculates, what its draft starts from: one that comes back begins as it did then, badly."""

    req: Request
    arrived: Any
    metadata: Metadata | None
    draft: tuple[torch.Tensor, ...]


class Arrivals(Protocol):
    """Where the KV of decoding requests lives."""

    parks: bool  # whether one that is retracted can be kept until there is room again

    def has_room(self, req: Request) -> bool:
        """Of its own, besides the page table's, for all that ``req`` may become."""

    def expect(self, req: Request) -> None:
        """Its KV will come in: it has a row, and slots."""


class Inbox:
    """``reserve``: tokens that every active request should be able to add; where nobody can be retracted it is all that
    the request may have."""

    def __init__(
        self, parts: DisaggComponents, observer: Observer, *, arrivals: Arrivals, reserve: int
    ) -> None:
        self._parts = parts
        self._arrivals = arrivals
        self._reserve = reserve
        self._stream = parts.transfer_stream(observer)
        self._queued: list[Request] = []
        self._receivers: dict[str, _Receiver] = {}
        self._parked: list[_Parked] = []
        self._ready: list[Ready] = []
        self._unserved: list[tuple[Request, str]] = []  # without room, and why they will not have any
        self._drafts: dict[str, tuple[torch.Tensor, ...]] = {}  # of requests that are there, for their return

    # ---- what is there --------------------------------------------------------------------------------------

    @property
    def held(self) -> list[Request]:
        """Requests that have a row and do not decode."""
        return [
            *(receiver.req for receiver in self._receivers.values()),
            *(entry.req for entry in self._ready),
        ]

    @property
    def wanting(self) -> int:
        """Requests that wait for room."""
        return len(self._queued) + len(self._parked)

    @property
    def is_empty(self) -> bool:
        return not (self._queued or self._receivers or self._parked or self._ready)

    @property
    def awaits(self) -> bool:
        """Whether some prefill worker has something to send."""
        return bool(self._receivers)

    # ---- requests come, and go early ------------------------------------------------------------------------

    def expect(self, req: Request) -> None:
        """A request has come in."""
        self._queued.append(req)

    def refuse(self, req: Request) -> None:
        """It has ended before it had anything: its prompt need not be computed."""
        self._tell(req, Dropped(req.id, preallocated=False))

    def withdraw(self, req: Request) -> bool:
        """Its client has gone: forget it if nothing is under way, and say whether that is so."""
        if req in self._queued:
            self._queued.remove(req)
            self.refuse(req)
            return True
        parked = [entry for entry in self._parked if entry.req is req]
        for entry in parked:
            self._parked.remove(entry)
        if req.id in self._receivers:
            self._tell(req, Dropped(req.id, preallocated=True))
        return bool(parked)

    # ---- room -----------------------------------------------------------------------------------------------

    def preallocate(self, running: Sequence[Request], before_transfer: Callable[[Any], None]) -> None:
        """Give room to those who wait for it, retracted ones first. ``before_transfer`` puts the transfer's stream
        behind whoever may still touch what is given away."""
        while self._parked and self._fits(self._parked[0].req, running):
            self._resume(self._parked.pop(0), before_transfer)
        while self._queued and not self._parked and self._fits(self._queued[0], running):
            req = self._queued.pop(0)
            slots = self._take(req, before_transfer)
            assert req.req_pool_idx is not None
            pages = self._parts.page_list(req.req_pool_idx, 0, req.kv_allocated_len)
            self._receivers[req.id] = _Receiver(req, slots)
            self._tell(req, Preallocated(req.id, tuple(pages)))

    def _fits(self, req: Request, running: Sequence[Request]) -> bool:
        """Room for ``req``, and behind it for what all active requests are granted, or any one of them may need."""
        cache = self._parts.cache
        if not cache.req_to_token_pool.available_size() or not self._arrivals.has_room(req):
            return False
        active = [*running, *self.held]
        size = cache.page_size
        needed = -(-_length(req) // size) * size
        free = cache.token_to_kv_pool_allocator.available_size() + cache.evictable_size() - needed
        if not active:  # whoever could not run alone was refused
            return True
        if not self._arrivals.parks:
            return free >= sum(_remaining(other) + size for other in (*active, req))
        rest = [min(_remaining(other), CLIP_MAX_NEW_TOKENS) + size for other in (*active, req)]
        return free >= max(max(rest), sum(min(self._reserve, each) for each in rest))

    def _take(self, req: Request, before_transfer: Callable[[Any], None]) -> torch.Tensor:
        """A row and slots for all KV that ``req`` comes with: [n] int64."""
        parts, length = self._parts, _length(req)
        pool = parts.cache.req_to_token_pool
        rows = pool.alloc(1)
        assert rows is not None
        req.req_pool_idx = rows[0]
        slots = _slots(parts, length)
        parts.streams.record(slots, self._stream)
        pool.req_to_token[req.req_pool_idx, :length] = slots.to(torch.int32)
        req.fill_len = req.kv_committed_len = req.kv_allocated_len = length
        self._arrivals.expect(req)
        before_transfer(self._stream)
        return slots

    # ---- KV comes -------------------------------------------------------------------------------------------

    def land(self, now: int) -> None:
        """Put what has come by ``now`` in its place."""
        parts = self._parts
        with parts.streams.on(self._stream):
            while (message := parts.link.poll(KV)) is not None:
                receiver = self._receivers.get(message.value.id)
                if isinstance(message.value, Failed):
                    self._fail(partial(_given_up, message.value))
                elif receiver is not None:
                    self._place(receiver, message.value, message.tensors, now)

    def _place(self, receiver: _Receiver, value: Chunk, tensors: Sequence[torch.Tensor], now: int) -> None:
        """In any order; what comes twice is written once."""
        if value.start in receiver.pieces:
            return
        receiver.pieces[value.start] = value.stop
        if tensors:
            row = receiver.req.req_pool_idx
            assert row is not None
            span = PageTableSpan(row, value.start, receiver.slots[value.start : value.stop])
            self._parts.port.scatter(span, tensors)
        if value.metadata is not None:
            receiver.last = value
        metadata = receiver.metadata
        if metadata is not None:
            receiver.req.transferred_at = now
            del self._receivers[receiver.req.id]
            self._ready.append(Ready(receiver.req, self._arrival(), metadata, metadata.draft))

    # ---- KV does not come -----------------------------------------------------------------------------------

    def bereave(self, gone: Mapping[int, str]) -> None:
        """These ranks send nothing more."""
        place = self._parts.place

        def why(req: Request) -> str:
            rank = place.prefill_of(req.index)
            return lost(place, rank, gone) if rank in gone else ""

        self._fail(why)

    def expire(self, reason: str) -> None:
        """Nothing has come for as long as one waits."""
        place = self._parts.place
        for receiver in self._receivers.values():
            source = place.name_of(place.prefill_of(receiver.req.index))
            receiver.failed = f"not all of its KV came from {source}: {reason}"

    def failed(self) -> list[tuple[Request, str]]:
        """Requests whose prompt will not come, and why; the room of those who have some is still theirs."""
        unserved, self._unserved = self._unserved, []
        failed = [receiver for receiver in self._receivers.values() if receiver.failed]
        for receiver in failed:
            del self._receivers[receiver.req.id]
        return [*unserved, *((receiver.req, receiver.failed) for receiver in failed)]

    def surrender(self) -> list[Request]:
        """All that are here, for good."""
        found = [*self.held, *self._queued, *(entry.req for entry in self._parked)]
        self._receivers.clear()
        self._queued, self._parked, self._ready = [], [], []
        return found

    def _fail(self, why: Callable[[Request], str]) -> None:
        """Those of whom it says why."""
        self._unserved += [(req, why(req)) for req in self._queued if why(req)]
        self._queued = [req for req in self._queued if not why(req)]
        for receiver in self._receivers.values():
            receiver.failed = receiver.failed or why(receiver.req)

    def take_ready(self) -> list[Ready]:
        """Those that can decode from now on; the current stream goes on behind their KV."""
        ready, self._ready = self._ready, []
        for entry in ready:
            self._parts.streams.schedule.wait_event(entry.arrived)
            if entry.draft:
                self._drafts[entry.req.id] = entry.draft
        return ready

    def forget(self, req: Request) -> None:
        """It has ended."""
        self._drafts.pop(req.id, None)

    def _arrival(self) -> Any:
        event = self._parts.streams.module.Event()
        event.record()
        return event

    # ---- KV goes to the host and comes back -----------------------------------------------------------------

    def park(self, req: Request) -> None:
        """Keep the KV of a request that is about to lose it in the host's memory: a blocking copy, as upstream's."""
        assert req.req_pool_idx is not None
        row = self._parts.cache.req_to_token_pool.req_to_token[req.req_pool_idx]
        slots = row[: _length(req)].to(torch.int64)
        values = [tensor.cpu() for tensor in self._parts.port.gather(slots)]
        self._parked.append(_Parked(req, self._drafts.get(req.id, ()), values))

    def _resume(self, parked: _Parked, before_transfer: Callable[[Any], None]) -> None:
        parts, req = self._parts, parked.req
        slots = self._take(req, before_transfer)
        device = parts.cache.req_to_token_pool.device
        assert req.req_pool_idx is not None
        with parts.streams.on(self._stream):
            values = [tensor.to(device) for tensor in parked.values]
            parts.port.scatter(PageTableSpan(req.req_pool_idx, 0, slots), values)
            self._ready.append(Ready(req, self._arrival(), None, parked.draft))

    def _tell(self, req: Request, value: Preallocated | Dropped) -> None:
        self._parts.link.send(self._parts.place.prefill_of(req.index), HANDSHAKE, value)


def _given_up(said: Failed, req: Request) -> str:
    return said.reason if req.id == said.id else ""


def _slots(parts: DisaggComponents, length: int) -> torch.Tensor:
    """[length] int64; with pages by three small blocking uploads, as upstream's."""
    cache = parts.cache
    device = cache.req_to_token_pool.device
    if cache.page_size == 1:
        evict_from_tree_cache(cache, length)
        slots = cache.token_to_kv_pool_allocator.alloc(length)
        assert slots is not None
        return slots
    return alloc_for_extend(
        cache,
        prefix_tensors=[torch.empty(0, dtype=torch.int64)],
        prefix_lens_cpu=torch.tensor([0]),
        seq_lens_cpu=torch.tensor([length]),
        prefix_lens=torch.tensor([0], device=device),
        seq_lens=torch.tensor([length], device=device),
        extend_num_tokens=length,
    )


def _length(req: Request) -> int:
    """Tokens whose KV it decodes from: the last one it was given has none yet."""
    return len(req.origin_input_ids) + max(0, len(req.output_ids) - 1)


def _remaining(req: Request) -> int:
    return req.sampling.max_new_tokens - len(req.output_ids)
