"""A transfer backend of SGLang between workers of one run: KV travels over an emulated link, in virtual time.

SGLang asks a backend for a manager, a sender for each request of a prefill worker and a receiver for each of a decode
worker, and polls them. Which pages there are, when they are sent and what follows is decided by SGLang.

    decode    receiver.send_metadata: pages, row of metadata ------> sender: bootstrapped
    prefill   sender.send: pages' KV, with the last ones metadata -> receiver: transferred
              sender: transferred at the same instant

The KV is read and written as a network adapter does it: no stream has a part in that, and nothing is launched.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, cast

import torch

from ....sched.disagg.kv import KVPort, PageTableSpan
from ...run.system import SystemParts
from ...vgpu.copies import receive
from ...vgpu.device import CURRENT
from ...vgpu.engine import EventRecording
from ...vgpu.fused import run_on_queue
from ...vgpu.tensor import DeviceTensor
from ..bridge import RunBridge
from ..messages import HostTensor
from ..turns import TurnLink
from .edge import replace_transfer_classes

HOST: Final = "schedbench"  # what requests name as the host of their prefill worker
_PAGES: Final = "pages"  # decode to prefill worker
_KV: Final = "kv"  # prefill to decode worker
_ABORT: Final = "abort"  # in both directions: the number of a request
_TAGS: Final = (_PAGES, _KV, _ABORT)
_GIVEN_UP: Final = "the request was given up by its client or by the other worker"


class _Pages(NamedTuple):
    """Where the KV of a request is stored on a decode worker: its pages, and the row of its metadata."""

    room: int
    pages: Sequence[int]
    row: int


class _Chunk(NamedTuple):
    """KV for these pages of the decode worker. With the last one come ``metadata``, and ``prefilled``: the tokens of
    the prompt that were cached, when the request was first scheduled, and when it was prefilled, ns of the common
    clock."""

    room: int
    pages: Sequence[int]
    row: int
    values: Sequence[HostTensor]
    metadata: Sequence[bytes] | None = None
    prefilled: tuple[int, int | None, int] | None = None


@dataclass(slots=True)
class _Landing:
    """What a prefill worker knows of the KV of one request."""

    pages: _Pages | None = None  # of the decode worker
    source: int = 0  # the number of the decode worker
    wanted: int = 0  # pages
    sent: int = 0  # pages
    row: int | None = None  # of the metadata on this worker
    at: int | None = None  # ns, when the last byte lands
    departed: EventRecording | None = None  # of the last bytes that were sent


class KVTransfers:
    """A worker's part of all transfers. ``install`` is called before SGLang's scheduler is made, ``bind`` after that,
    and ``arrived`` in each turn of the loop."""

    def __init__(self, parts: SystemParts, bridge: RunBridge) -> None:
        assert parts.context.place is not None
        self._link, self._place = cast(TurnLink, parts.context.link), parts.context.place
        self._bridge, self._clock = bridge, parts.clock
        self._page_size = parts.resolved.scenario.engine.page_size
        self._model = parts.resolved.model
        self._gpu = CURRENT.get()
        self._queue = self._gpu.runtime.simulation.queue()
        self._gpu.observer.streams[self._queue.id] = "link"
        self._leaves = 0  # when the link is free, ns
        self._landings: dict[int, _Landing] = {}  # of senders, by room
        self._received: set[int] = set()  # rooms whose KV is here
        self._aborted: set[int] = set()
        self._port: KVPort
        self._metadata: Any = None  # SGLang's description of registered memory
        self._states: Any = import_module("sglang.srt.disaggregation.base.conn").KVPoll

    def install(self) -> None:
        kinds = import_module("sglang.srt.disaggregation.utils").KVClassType
        makers = {kinds.MANAGER: _manager, kinds.SENDER: _sender, kinds.RECEIVER: _receiver}
        replace_transfer_classes(lambda kind, known: makers[kind](known, self) if kind in makers else known)

    def bind(self, port: KVPort) -> None:
        """``port``: to the KV of the model."""
        self._port = port

    # ---- the loop ------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Drop what aborted requests have left, between two workloads."""
        self._landings.clear()
        self._received.clear()
        self._aborted.clear()

    def arrived(self) -> bool:
        """Take in what has arrived by now; returns whether anything has."""
        self._link.take_turn()
        return self._taken_in()

    def sleep_until(self, at: int) -> None:
        """Sleep until ``at``, ns, until something arrives, or until something that was sent has landed. Raises
        LinkError where that is never."""
        now = self._gpu.runtime.now
        landings = [x.at for x in self._landings.values() if x.at is not None and x.at > now]
        self._link.sleep_until(min([at, *landings]))
        self._taken_in()

    def _taken_in(self) -> bool:
        found = False
        for tag in _TAGS:
            while (message := self._link.poll(tag)) is not None:
                found = True
                if tag == _ABORT:
                    self._aborted.add(message.value)
                elif tag == _PAGES:
                    landing = self._landing(message.value.room)
                    landing.pages, landing.source = message.value, message.source
                else:
                    self._land(message.value)
        return found

    def _landing(self, room: int) -> _Landing:
        return self._landings.setdefault(room, _Landing())

    # ---- KV ------------------------------------------------------------------------------------------------

    def _slots(self, pages: Sequence[int]) -> torch.Tensor:
        """The slots [n] int64 of these pages."""
        size = self._page_size
        return (torch.tensor(pages, dtype=torch.int64).unsqueeze(1) * size + torch.arange(size)).view(-1)

    def _read(self, pages: Sequence[int]) -> Sequence[HostTensor]:
        executor = self._gpu.executor

        def gathered() -> Sequence[HostTensor]:
            found = self._port.gather(*receive(self._gpu, [self._slots(pages)], None))
            held = [tensor.held for tensor in found if isinstance(tensor, DeviceTensor)]
            return [HostTensor.of(x if x.is_meta else executor.read(torch.clone, (x,), {})) for x in held]

        return run_on_queue("send", self._queue, gathered)

    def _write(self, pages: Sequence[int], values: Sequence[HostTensor]) -> None:
        def scattered() -> None:
            slots, *kv = receive(self._gpu, [self._slots(pages), *(x.value() for x in values)], None)
            self._port.scatter(PageTableSpan(0, 0, slots), kv)

        run_on_queue("receive", self._queue, scattered)
        here = self._gpu.runtime.idle(self._queue)  # the host has been notified
        assert here, "KV has landed before the message arrives"

    def _land(self, chunk: _Chunk) -> None:
        if chunk.pages:
            self._write(chunk.pages, chunk.values)
        if chunk.metadata is not None:
            for pointer, row in zip(self._metadata.aux_data_ptrs, chunk.metadata, strict=True):
                ctypes.memmove(pointer + chunk.row * len(row), row, len(row))
            if request := self._bridge.numbered(chunk.room - 1):
                assert chunk.prefilled is not None
                request.cached_tokens, request.first_scheduled_at, request.prefilled_at = chunk.prefilled
                request.transferred_at = self._clock.now()
            self._received.add(chunk.room)

    def _send(self, room: int, pages: Sequence[int]) -> None:
        """Send the KV of the next pages of a request, and with the last of them its metadata."""
        runtime, profile, landing = self._gpu.runtime, self._link.profile, self._landing(room)
        assert landing.pages is not None and landing.row is not None
        begin, landing.sent = landing.sent, landing.sent + len(pages)
        last = landing.sent >= landing.wanted
        values = self._read(pages) if pages else ()
        runtime.now += round(profile.call.value)
        size = len(pages) * self._page_size * self._model.num_layers * 2 * self._model.kv_size
        duration = round(size * self._model.dtype.itemsize * 1e9 / profile.bandwidth.value)
        landing.departed = runtime.send(
            self._queue, duration, size=size * self._model.dtype.itemsize, name="send kv"
        )
        self._leaves = max(self._leaves, runtime.now) + duration
        lands = self._leaves + round(profile.latency.value)
        chunk = _Chunk(room, landing.pages.pages[begin : landing.sent], landing.pages.row, values)
        if last:
            request = self._bridge.numbered(room - 1)
            assert request is not None
            prefilled = request.cached_tokens, request.first_scheduled_at, self._clock.now()
            kinds = zip(self._metadata.aux_data_ptrs, self._metadata.aux_item_lens, strict=True)
            rows = [ctypes.string_at(pointer + landing.row * size, size) for pointer, size in kinds]
            chunk = chunk._replace(metadata=rows, prefilled=prefilled)
            landing.at = lands
        self._link.post(landing.source, _KV, chunk, lands)

    def _abort(self, room: int) -> None:
        if room not in self._aborted:
            self._aborted.add(room)
            prefills = self._place.role == "prefill"
            other = self._place.decode_of if prefills else self._place.prefill_of
            self._link.send(other(room - 1), _ABORT, room)


def _manager(base: Any, transfers: KVTransfers) -> Any:
    class LinkManager(base):  # type: ignore[misc]
        def __init__(self, args: Any, *rest: Any, **named: Any) -> None:
            super().__init__(args, *rest, **named)
            self.kv_args = transfers._metadata = args
            # By the workers' addresses: each is one rank.
            one = SimpleNamespace(dp_size=1, follow_bootstrap_room=True)
            self.prefill_info_table = SimpleNamespace(get=lambda _: one)

    return LinkManager


def _transfer_end(base: Any, transfers: KVTransfers) -> Any:
    """What the sender and the receiver of a request's KV have in common. ``conclude_state``, which SGLang reads, is the
    state in which the transfer has ended, or None; earlier versions of SGLang have none in their own classes."""
    states = transfers._states

    class TransferEnd(base):  # type: ignore[misc]
        conclude_state: Any = None

        def __init__(
            self, mgr: Any, bootstrap_addr: str, bootstrap_room: int, *args: Any, **named: Any
        ) -> None:
            super().__init__(mgr, bootstrap_addr, bootstrap_room, *args, **named)
            self._room = bootstrap_room

        def abort(self) -> None:
            self.conclude_state = states.Failed
            transfers._abort(self._room)

        def failure_exception(self) -> None:
            raise RuntimeError(_GIVEN_UP)

        def poll(self) -> Any:
            if self.conclude_state is not None:
                return self.conclude_state
            state = states.Failed if self._room in transfers._aborted else self._state()
            if state in (states.Failed, states.Success):
                self.conclude_state = state
            return state

    return TransferEnd


def _sender(base: Any, transfers: KVTransfers) -> Any:
    states = transfers._states

    class LinkSender(_transfer_end(base, transfers)):  # type: ignore[misc]
        def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
            landing = transfers._landing(self._room)
            landing.wanted, landing.row = num_kv_indices, aux_index

        def send(self, kv_indices: Any, *_: Any, **__: Any) -> None:
            transfers._send(self._room, kv_indices.tolist())

        def _state(self) -> Any:
            landing = transfers._landing(self._room)
            if landing.pages is None:
                return states.Bootstrapping
            if not landing.sent:
                return states.WaitingForInput
            if landing.at is None or landing.at > transfers._gpu.runtime.now:
                return states.Transferring
            del transfers._landings[self._room]
            if landing.departed is not None:
                transfers._gpu.runtime.reached(landing.departed)  # the host knows that its KV has been read
            return states.Success

    return LinkSender


def _receiver(base: Any, transfers: KVTransfers) -> Any:
    """Without ``send_metadata`` in earlier versions of SGLang, ``init`` does what it does. In later ones ``init`` only
    finds the prefill worker."""
    states = transfers._states

    class LinkReceiver(_transfer_end(base, transfers)):  # type: ignore[misc]
        has_sent_metadata = False
        bootstrap_done = not hasattr(base, "send_metadata")

        def send_metadata(self, kv_indices: Any, aux_index: int | None = None, *_: Any, **__: Any) -> None:
            assert aux_index is not None
            self.has_sent_metadata = True
            place, pages = transfers._place, _Pages(self._room, kv_indices.tolist(), aux_index)
            transfers._link.send(place.prefill_of(self._room - 1), _PAGES, pages)

        def _state(self) -> Any:
            if not self.bootstrap_done:
                return states.Bootstrapping
            if not self.has_sent_metadata:
                return states.WaitingForInput
            if self._room not in transfers._received:
                return states.Transferring
            transfers._received.remove(self._room)
            return states.Success

    if not hasattr(base, "send_metadata"):
        LinkReceiver.init = LinkReceiver.send_metadata
    return LinkReceiver
