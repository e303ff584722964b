"""KV of decoding requests on the host, with a hot buffer for each on the device (upstream ``HiSparseCoordinator``).

The states of a request::

    prompt     completely on the device, through the mapping, chunk by chunk
    staging    being copied to the host on a separate stream, while the request waits in a queue
    arriving   instead of both if another worker computes the prompt: received KV is written to the host
    decoding   the first B slots remain as the hot buffer; every step backs up the token before the new one

The order of copies: a backup waits for the schedule stream (slot numbers) and the forward stream (the token); the next
decode forward waits for the backup, because it overwrites the slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch

from ..batch import ScheduleBatch
from ..kernels.hot_buffers import map_newest, map_prompt, previous_tokens, translate, unmap
from ..memory.invariants import MemoryInvariantError, Peek, check_once
from ..memory.pools import KVAllocator, ReqToTokenPool
from ..memory.tier import HostView, KVTier
from ..request import Request
from ..streams import Streams
from .pools import HostPool, HotBuffers
from .transfer import KVTransfer


class Coordinator(KVTier):
    """The ``KVTier`` of an engine whose ``allocator`` has more tokens than its ``device_allocator``.

    Invariants, which ``check`` verifies: every device page is free, or mapped by a prompt, or in one hot buffer; every
    page of the host is free or belongs to one request.
    """

    stages = True
    can_offload = False

    def __init__(
        self,
        *,
        allocator: KVAllocator,
        device_allocator: KVAllocator,
        slots: ReqToTokenPool,
        buffers: HotBuffers,
        host: HostPool,
        transfer: KVTransfer,
        streams: Streams,
    ) -> None:
        super().__init__(allocator)
        self.device_allocator = device_allocator
        self._slots = slots
        self.buffers = buffers
        self.host = host
        self._transfer = transfer
        self._streams = streams
        self.staging_stream = streams.module.Stream()
        self.backup_stream = streams.module.Stream()
        self._prompts: dict[Request, None] = {}
        self._staging: dict[Request, Any] = {}  # with the event behind each one's copy, in order
        self._arriving: dict[Request, None] = {}
        self._buffer_sizes: dict[Request, int] = {}  # of decoding requests
        self._host_pages: dict[Request, list[int]] = {}
        self._fresh: set[int] = set()  # rows whose previous token was staged with the prompt
        self._backed_up: Any = None  # event of the last backup
        self._awaited: Any = None  # the same, until a decode forward waits for it

    # ---- capacity ------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        return min(self._allocator.size, self.device_allocator.size)

    @property
    def absent(self) -> Sequence[Request]:
        return [*self._staging, *self._prompts]

    def unclaimed_size(self) -> int:
        claimed = sum(max(0, self.claim(req) - self._held(req.kv_allocated_len)) for req in self.absent)
        claimed += sum(self._final_size(req) for req in self._arriving)
        claimed += sum(self._final_size(req) - size for req, size in self._buffer_sizes.items())
        return self.device_allocator.available_size() - claimed

    def claim(self, req: Request) -> int:
        return max(self._held(req.seqlen), self._final_size(req))

    def _held(self, tokens: int) -> int:
        return -(-tokens // self.host.page_size) * self.host.page_size

    def _final_size(self, req: Request) -> int:
        return self.buffers.full_size(len(req.origin_input_ids) + req.sampling.max_new_tokens)

    def fits(self, reqs: Sequence[Request]) -> bool:
        needed = sum(self._growth(req, req.kv_allocated_len + 1) for req in reqs)
        return self.device_allocator.available_size() >= needed

    # ---- prompts -------------------------------------------------------------------------------------------

    def place_prompts(self, batch: ScheduleBatch) -> None:
        size = self.device_allocator.page_size
        pages = self.device_allocator.claim(sum(-(-new // size) for new in batch.extend_lens))
        assert pages is not None, "admission took prompts that the device has no room for"
        map_prompt(self.buffers.mapping, batch.out_cache_loc, pages, size)
        self._prompts.update(dict.fromkeys(batch.reqs))

    # ---- staging -------------------------------------------------------------------------------------------

    def admit(self, req: Request) -> None:
        """Start copying the prompt's KV to the host (upstream ``admit_request_into_staging``)."""
        row, length = req.row, req.kv_committed_len
        pages = self._host_pages[req] = self.host.alloc(length)
        self._set_host_slots(row, 0, pages, pinned=True)
        slots = translate(self.buffers.mapping, self._slots.req_to_token[row, :length])
        host_slots = self.buffers.host_slots[row, :length]
        self._streams.wait(self.staging_stream, self._streams.schedule)
        with self._streams.on(self.staging_stream):
            self._transfer.back_up(slots, host_slots)
            finished = self._staging[req] = self._streams.module.Event()
            finished.record()
        slots.record_stream(self.staging_stream)
        del self._prompts[req]

    def collect_ready_reqs(self) -> list[Request]:
        ready = list(takewhile(lambda req: self._staging[req].query(), self._staging))
        for req in ready:
            del self._staging[req]
            self._open_buffer(req)
        return ready

    def is_staging(self, req: Request) -> bool:
        return req in self._staging

    def _open_buffer(self, req: Request) -> None:
        """Make the prompt's first slots the hot buffer and free the others (upstream ``alloc_device_buffer``)."""
        row, length = req.row, req.kv_committed_len
        held = unmap(self.buffers.mapping, self._slots.req_to_token[row, :length], self.host.page_size)
        size = self.buffers.full_size(length)
        self.buffers.device_buffer[row, :size] = held[:size]
        self.device_allocator.free(held[size:])
        self.buffers.staged_lens[row].fill_(length)
        self._buffer_sizes[req] = size
        self._fresh.add(row)

    # ---- prompts of other workers ---------------------------------------------------------------------------

    def has_room(self, req: Request) -> bool:
        return self.unclaimed_size() >= self._final_size(req)

    def expect(self, req: Request) -> None:
        pages = self._host_pages[req] = self.host.alloc(req.kv_allocated_len)
        self._set_host_slots(req.row, 0, pages, pinned=True)
        self._arriving[req] = None

    def admit_direct(self, req: Request) -> None:
        """Allocate the hot buffer. A short request's buffer is filled; a long one's is empty, and its first decode
        fetches the tokens that it selects (upstream ``admit_request_direct``)."""
        del self._arriving[req]
        row, length, buffers = req.row, req.kv_committed_len, self.buffers
        size = buffers.full_size(length)
        slots = self.device_allocator.alloc(size)
        assert slots is not None, "its device memory was claimed on admission"
        buffers.device_buffer[row, :size] = slots
        if length <= buffers.size:
            self._transfer.preload(slots[:length], buffers.host_slots[row, :length])
        else:
            buffers.empty(row)
        buffers.staged_lens[row].fill_(length)
        self._buffer_sizes[req] = size
        self._fresh.add(row)

    # ---- decoding ------------------------------------------------------------------------------------------

    def place_tokens(self, batch: ScheduleBatch, view: HostView) -> None:
        """Back up the previous tokens, grow buffers, and map the new tokens' logical slots (upstream
        ``map_last_loc_to_buffer``)."""
        rows: list[int] = view.host_indices(batch).tolist()
        lens: list[int] = batch.seq_lens_cpu.tolist()
        on_device = [batch.req_pool_indices, view.buffer_lengths(batch)]
        picked = self._to_back_up(batch.reqs, rows, lens)
        if picked:
            indices = view.backup_indices(picked)
            self._back_up(*(on_device if indices is None else [tensor[indices] for tensor in on_device]))
        self._grow_device_buffers(batch.reqs, rows, lens)
        buffers = self.buffers
        map_newest(buffers.mapping, batch.out_cache_loc, buffers.device_buffer, *on_device, buffers.size)

    def before_forward(self, batch: ScheduleBatch) -> None:
        if batch.forward_mode.is_decode and self._awaited is not None:
            self._streams.module.current_stream().wait_event(self._awaited)
            self._awaited = None

    def _to_back_up(self, reqs: Sequence[Request], rows: list[int], lens: list[int]) -> list[int]:
        """Allocate a host slot for each previous token that is not on the host. Returns the indices of its requests in
        the batch."""
        picked = [index for index, row in enumerate(rows) if row not in self._fresh]
        self._fresh.clear()
        for index in picked:
            pages = self._host_pages[reqs[index]]
            start, length = len(pages) * self.host.page_size, lens[index] - 1
            if start < length:
                more = self.host.alloc(length - start)
                self._set_host_slots(rows[index], start, more, pinned=False)
                pages += more
        return picked

    def _back_up(self, rows: torch.Tensor, lens: torch.Tensor) -> None:
        """Start copying the tokens before the new ones, which ``lens`` [n] int64 count, of ``rows`` [n] int64."""
        buffers = self.buffers
        slots, host_slots = previous_tokens(
            buffers.device_buffer, buffers.host_slots, buffers.staged_lens, rows, lens, buffers.size
        )
        self._streams.wait(self.backup_stream, self._streams.schedule)
        self._streams.wait(self.backup_stream, self._streams.forward)
        with self._streams.on(self.backup_stream):
            self._transfer.back_up(slots, host_slots)
            self._backed_up = self._awaited = self._streams.module.Event()
            self._backed_up.record()
        for tensor in (slots, host_slots):
            tensor.record_stream(self.backup_stream)

    def _set_host_slots(self, row: int, start: int, pages: Sequence[int], *, pinned: bool) -> None:
        slots = self.host.slots(pages)
        table = self.buffers.host_slots
        sent = (slots.pin_memory() if pinned else slots).to(table.device, non_blocking=True)
        table[row, start : start + slots.shape[0]] = sent

    def _grow_device_buffers(self, reqs: Sequence[Request], rows: list[int], lens: list[int]) -> None:
        """Add a page to the buffers of short requests if the new token needs it."""
        for req, row, length in zip(reqs, rows, lens, strict=True):
            growth, size = self._growth(req, length), self._buffer_sizes[req]
            if growth:
                more = self.device_allocator.alloc(growth)
                assert more is not None, "retraction left too little device memory for the remaining requests"
                self.buffers.device_buffer[row, size : size + growth] = more
                self._buffer_sizes[req] = size + growth

    def _growth(self, req: Request, length: int) -> int:
        """How many slots the buffer of a decoding request lacks for ``length`` tokens."""
        return max(0, self.buffers.full_size(length) - self._buffer_sizes[req])

    def tables(self) -> Mapping[str, torch.Tensor]:
        names = ("mapping", "device_buffer", "tokens", "lru", "host_slots")
        return {name: getattr(self.buffers, name) for name in names}

    def check(self, peek: Peek) -> None:
        size, pages = self.host.page_size, peek(self.device_allocator.free_pages).tolist()
        table, mapping = peek(self._slots.req_to_token), peek(self.buffers.mapping)
        for req in self.absent:
            slots = mapping[table[req.row, : req.kv_allocated_len].to(torch.int64)]
            pages += (slots // size).unique().tolist()
        for req, held in self._buffer_sizes.items():
            buffer = peek(self.buffers.device_buffer)[req.row, :held]
            pages += (buffer // size).unique().tolist()
            if req.row not in self._fresh:
                self._check_newest(req, mapping, table, buffer)
        check_once("device page", pages, self.device_allocator.size // size)
        held_on_host = [page for held in self._host_pages.values() for page in held]
        check_once("host page", [*self.host.free_pages, *held_on_host], self.host.pages)

    def _check_newest(
        self, req: Request, mapping: torch.Tensor, table: torch.Tensor, buffer: torch.Tensor
    ) -> None:
        position = req.kv_allocated_len - 1
        slot = int(mapping[int(table[req.row, position])])
        kept = int(buffer[min(position, self.buffers.size)])
        if slot != kept:
            raise MemoryInvariantError(
                f"position {position} of request {req.id} is mapped to device slot {slot}, "
                f"but its hot buffer has slot {kept} for the newest token"
            )

    # ---- release -------------------------------------------------------------------------------------------

    def release(self, req: Request) -> None:
        row, length = req.row, req.kv_allocated_len
        finished = self._staging.pop(req, None)
        if finished is not None:  # the request is being staged: the host waits for the copy
            finished.synchronize()
        self._await_readers()
        held = unmap(self.buffers.mapping, self._slots.req_to_token[row, :length], self.host.page_size)
        if req in self._arriving:
            del self._arriving[req]
            held = held[:0]
        if req in self._buffer_sizes:
            held = self.buffers.device_buffer[row, : self._buffer_sizes.pop(req)]
        self.device_allocator.free(held)
        self.host.free(self._host_pages.pop(req, ()))
        self._prompts.pop(req, None)
        self._fresh.discard(row)
        self.buffers.reset(row)

    def _await_readers(self) -> None:
        """Let the schedule stream wait for the current forward, which may read or write the released slots, and for the
        last backup, which reads them."""
        self._streams.wait(self._streams.schedule, self._streams.forward)
        if self._backed_up is not None:
            self._streams.schedule.wait_event(self._backed_up)
