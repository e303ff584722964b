"""The decode worker's side of a transfer (upstream ``DecodePreallocQueue`` and ``DecodeTransferQueue``).

queued          until there are pages for the prompt, in order of arrival
transferring    a row and slots are allocated, KV is being received
ready           all KV has been received: the request joins the next batch
offloaded       retracted: its KV is in the host's memory until there are pages again
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..config import CLIP_MAX_NEW_TOKENS
from ..memory.allocation import alloc_for_extend, alloc_token_slots
from ..memory.tier import KVTier
from ..observe import Observer
from ..request import Request
from .kv import DisaggComponents, PageTableSpan
from .layout import HANDSHAKE, KV, Chunk, Dropped, Failed, Metadata, Preallocated


@dataclass(slots=True)
class _Receiver:
    req: Request
    slots: torch.Tensor  # [prompt] int64
    chunks: dict[int, int] = field(default_factory=dict)  # received ones: start to stop
    last: Chunk | None = None  # the one with the metadata
    failed: str = ""  # why the rest will not be received
    arrived: Any = None  # event behind which the KV may be read, once it is complete

    @property
    def metadata(self) -> Metadata | None:
        """None until all chunks have been received, and for a request that was offloaded."""
        received = sum(stop - start for start, stop in self.chunks.items())
        return self.last.metadata if self.last is not None and self.last.stop == received else None


class Inbox:
    """``reserve`` is the number of tokens that every active request should be able to add. Where the tier cannot
    offload, no request can be retracted, and room is kept for all that the active requests may add."""

    def __init__(
        self, components: DisaggComponents, observer: Observer, *, tier: KVTier, reserve: int
    ) -> None:
        self._components = components
        self._tier = tier
        self._reserve = reserve
        self._stream = components.transfer_stream(observer)
        self._queued: list[Request] = []
        self._receivers: dict[str, _Receiver] = {}
        # KV of offloaded requests on the host, as the port gathered it.
        self._offloaded: dict[Request, Sequence[torch.Tensor]] = {}
        self._ready: list[_Receiver] = []
        self._failed: list[tuple[Request, str]] = []  # queued requests that failed, and why

    # ---- state ----------------------------------------------------------------------------------------------

    @property
    def held(self) -> list[Request]:
        """Requests that have a row and are not decoding."""
        return [receiver.req for receiver in (*self._receivers.values(), *self._ready)]

    @property
    def requests(self) -> list[Request]:
        """All requests that are here."""
        return [*self.held, *self._queued, *self._offloaded]

    @property
    def num_waiting(self) -> int:
        """How many requests wait for pages."""
        return len(self._queued) + len(self._offloaded)

    @property
    def is_empty(self) -> bool:
        return not (self._queued or self._receivers or self._offloaded or self._ready)

    @property
    def is_receiving(self) -> bool:
        """Whether a prefill worker has KV to send."""
        return bool(self._receivers)

    # ---- arrivals and aborts --------------------------------------------------------------------------------

    def enqueue(self, req: Request) -> None:
        """Let a request that has arrived wait for pages."""
        self._queued.append(req)

    def refuse(self, req: Request) -> None:
        """Notify the prefill worker that the prompt of ``req``, which ended before it had pages, is not needed."""
        self._send_to_prefill(req, Dropped(req.id, preallocated=False))

    def withdraw(self, req: Request) -> bool:
        """Remove an aborted request that is queued or offloaded. Returns whether it was removed."""
        if req in self._queued:
            self._queued.remove(req)
            self.refuse(req)
            return True
        if req.id in self._receivers:
            self._send_to_prefill(req, Dropped(req.id, preallocated=True))
        return self._offloaded.pop(req, None) is not None

    # ---- allocation -----------------------------------------------------------------------------------------

    def preallocate(self, running: Sequence[Request], before_transfer: Callable[[Any], None]) -> None:
        """Allocate rows and pages to waiting requests, offloaded ones first. ``before_transfer`` orders the transfer's
        stream after all work that may still use what is allocated."""
        while self._offloaded and self._fits(req := next(iter(self._offloaded)), running):
            self._resume(req, self._offloaded.pop(req), before_transfer)
        while self._queued and not self._offloaded and self._fits(self._queued[0], running):
            req = self._queued.pop(0)
            slots = self._allocate(req, before_transfer)
            pages = self._components.page_list(req.row, 0, req.kv_allocated_len)
            self._receivers[req.id] = _Receiver(req, slots)
            self._send_to_prefill(req, Preallocated(req.id, tuple(pages)))

    def _fits(self, req: Request, running: Sequence[Request]) -> bool:
        """Whether there is room for ``req`` and, besides, for what all active requests may add: the reserve of each and
        everything of any one of them."""
        cache = self._components.cache
        if not cache.req_to_token_pool.available_size() or not self._tier.has_room(req):
            return False
        active = [*running, *self.held]
        size = cache.page_size
        needed = -(-_kv_length(req) // size) * size
        free = cache.token_to_kv_pool_allocator.available_size() + cache.evictable_size() - needed
        if not active:  # a request that cannot run alone was refused
            return True
        if not self._tier.can_offload:
            return free >= sum(_remaining(other) + size for other in (*active, req))
        rest = [min(_remaining(other), CLIP_MAX_NEW_TOKENS) + size for other in (*active, req)]
        return free >= max(max(rest), sum(min(self._reserve, each) for each in rest))

    def _allocate(self, req: Request, before_transfer: Callable[[Any], None]) -> torch.Tensor:
        """Allocate a row, and slots for all KV that ``req`` decodes from: [n] int64."""
        components, length = self._components, _kv_length(req)
        pool = components.cache.req_to_token_pool
        rows = pool.alloc(1)
        assert rows is not None
        req.req_pool_idx = rows[0]
        slots = _allocate_slots(components, length)
        components.streams.record(slots, self._stream)
        pool.req_to_token[req.req_pool_idx, :length] = slots.to(torch.int32)
        req.fill_len = req.kv_committed_len = req.kv_allocated_len = length
        self._tier.expect(req)
        before_transfer(self._stream)
        return slots

    # ---- receiving ------------------------------------------------------------------------------------------

    def receive_kv(self, now: int) -> None:
        """Write the KV that has arrived by ``now`` to the pool."""
        components = self._components
        with components.streams.on(self._stream):
            while (message := components.link.poll(KV)) is not None:
                receiver = self._receivers.get(message.value.id)
                if isinstance(message.value, Failed):
                    self._fail({message.value.id: message.value.reason})
                elif receiver is not None:
                    self._write_chunk(receiver, message.value, message.tensors, now)

    def _write_chunk(
        self, receiver: _Receiver, chunk: Chunk, tensors: Sequence[torch.Tensor], now: int
    ) -> None:
        """Chunks may come in any order; one that comes twice is written once."""
        if chunk.start in receiver.chunks:
            return
        receiver.chunks[chunk.start] = chunk.stop
        if tensors:
            span = PageTableSpan(receiver.req.row, chunk.start, receiver.slots[chunk.start : chunk.stop])
            self._components.port.scatter(span, tensors)
        if chunk.metadata is not None:
            receiver.last = chunk
        if receiver.metadata is not None:
            receiver.req.transferred_at = now
            del self._receivers[receiver.req.id]
            self._complete(receiver)

    def _complete(self, receiver: _Receiver) -> None:
        """Note on the transfer's stream that all KV of the request has been written."""
        receiver.arrived = self._components.streams.module.Event()
        receiver.arrived.record()
        self._ready.append(receiver)

    def take_ready(self) -> list[Request]:
        """Requests that can decode from now on, with what came with their KV. The schedule stream waits for the KV."""
        ready, self._ready = self._ready, []
        for entry in ready:
            self._components.streams.schedule.wait_event(entry.arrived)
            req, metadata = entry.req, entry.metadata
            if metadata is not None:
                req.output_ids.append(metadata.token)
                req.output_logprobs.extend(metadata.logprobs)
                req.cached_tokens = metadata.cached_tokens
                req.first_scheduled_at = metadata.first_scheduled_at
                req.prefilled_at = metadata.prefilled_at
                req.draft = metadata.draft
        return [entry.req for entry in ready]

    # ---- failures -------------------------------------------------------------------------------------------

    def fail_from(self, gone: Mapping[int, str]) -> None:
        """Fail the requests whose prefill worker is among the ``gone`` ranks."""
        layout = self._components.layout
        reqs = [*self._queued, *(receiver.req for receiver in self._receivers.values())]
        ranks = {req.id: layout.prefill_of(req.index) for req in reqs}
        self._fail({name: layout.gone_reason(rank, gone) for name, rank in ranks.items() if rank in gone})

    def expire(self, reason: str) -> None:
        """Fail the requests that are being received, because nothing has arrived in time."""
        layout = self._components.layout
        for receiver in self._receivers.values():
            source = layout.name_of(layout.prefill_of(receiver.req.index))
            receiver.failed = f"not all of its KV came from {source}: {reason}"

    def take_failed(self) -> list[tuple[Request, str]]:
        """Requests whose KV will not arrive, and why. Those that have a row and pages still hold them."""
        queued, self._failed = self._failed, []
        failed = [receiver for receiver in self._receivers.values() if receiver.failed]
        for receiver in failed:
            del self._receivers[receiver.req.id]
        return [*queued, *((receiver.req, receiver.failed) for receiver in failed)]

    def _fail(self, reasons: Mapping[str, str]) -> None:
        """Fail the requests that ``reasons`` has by their ids."""
        self._failed += [(req, reasons[req.id]) for req in self._queued if req.id in reasons]
        self._queued = [req for req in self._queued if req.id not in reasons]
        for receiver in self._receivers.values():
            receiver.failed = receiver.failed or reasons.get(receiver.req.id, "")

    # ---- offloading -----------------------------------------------------------------------------------------

    def offload(self, req: Request) -> None:
        """Copy the KV of a request that is about to be retracted to the host: a blocking copy, as upstream's."""
        row = self._components.cache.req_to_token_pool.req_to_token[req.row]
        slots = row[: _kv_length(req)].to(torch.int64)
        self._offloaded[req] = [tensor.cpu() for tensor in self._components.port.gather(slots)]

    def _resume(
        self, req: Request, values: Sequence[torch.Tensor], before_transfer: Callable[[Any], None]
    ) -> None:
        components, slots = self._components, self._allocate(req, before_transfer)
        device = components.cache.req_to_token_pool.device
        with components.streams.on(self._stream):
            components.port.scatter(PageTableSpan(req.row, 0, slots), [value.to(device) for value in values])
            self._complete(_Receiver(req, slots))

    def _send_to_prefill(self, req: Request, value: Preallocated | Dropped) -> None:
        components = self._components
        components.link.send(components.layout.prefill_of(req.index), HANDSHAKE, value)


def _allocate_slots(components: DisaggComponents, length: int) -> torch.Tensor:
    """[length] int64; with pages of several tokens by three small blocking uploads, as upstream's."""
    cache = components.cache
    device = cache.req_to_token_pool.device
    if cache.page_size == 1:
        return alloc_token_slots(cache, length)
    return alloc_for_extend(
        cache,
        [torch.empty(0, dtype=torch.int64)],
        length,
        on_device=(
            torch.tensor([0], device=device),
            torch.tensor([length], device=device),
        ),
        on_host=(torch.tensor([0]), torch.tensor([length])),
    )


def _kv_length(req: Request) -> int:
    """Tokens whose KV the request decodes from: its last output token has no KV yet."""
    return len(req.origin_input_ids) + max(0, len(req.output_ids) - 1)


def _remaining(req: Request) -> int:
    return req.sampling.max_new_tokens - len(req.output_ids)
