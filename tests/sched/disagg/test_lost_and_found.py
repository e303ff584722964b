"""Both sides of a transfer by themselves: chunks that come twice, late or never, and ranks that are gone."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from schedbench.sched.config import SamplingParams
from schedbench.sched.disagg.inbox import Inbox, _Receiver
from schedbench.sched.disagg.kv import DisaggComponents, PageTableSpan
from schedbench.sched.disagg.layout import RankLayout
from schedbench.sched.disagg.messages import HANDSHAKE, KV, Chunk, Failed, Metadata, Preallocated
from schedbench.sched.disagg.outbox import Outbox, _Sender, _Transferring
from schedbench.sched.link import Message
from schedbench.sched.observe import Observer
from schedbench.sched.request import Request

METADATA = Metadata(7, (), 0, None, None)


class Wire:
    """What is there to be heard, and what was sent."""

    rank, size = 0, 3

    def __init__(self) -> None:
        self.sent: list[tuple[int, str, Any]] = []
        self.heard: list[tuple[str, Any]] = []

    def send(self, to: int, tag: str, value: Any, tensors: Sequence[torch.Tensor] = ()) -> None:  # noqa: ARG002
        self.sent.append((to, tag, value))

    def poll(self, tag: str) -> Message | None:
        for entry in [entry for entry in self.heard if entry[0] == tag][:1]:
            self.heard.remove(entry)
            return Message(0, entry[1], (torch.tensor([0]),) if isinstance(entry[1], Chunk) else ())
        return None


class Port:
    """Slots as they are written."""

    def __init__(self) -> None:
        self.written: list[list[int]] = []

    def scatter(self, span: PageTableSpan, values: Sequence[torch.Tensor]) -> None:  # noqa: ARG002
        self.written.append(span.slots.tolist())


class Event:
    def record(self) -> None: ...


def components(wire: Wire, port: Port, rank: int) -> DisaggComponents:
    module = SimpleNamespace(Stream=lambda: SimpleNamespace(stream_id=9), Event=Event)
    streams = SimpleNamespace(module=module, on=lambda _: nullcontext())
    place = RankLayout(rank, prefill=2, decode=1)
    return DisaggComponents(place, wire, port, None, streams)  # type: ignore[arg-type]


def request(index: int) -> Request:
    return Request(f"r{index}", array("q", range(8)), SamplingParams(max_new_tokens=4), 0, index)


def expecting(*indices: int) -> tuple[Inbox, Wire, Port]:
    """A decode worker with room for prompts of eight tokens."""
    wire, port = Wire(), Port()
    elsewhere: Any = SimpleNamespace(can_offload=True, has_room=lambda _: True, expect=lambda _: None)
    inbox = Inbox(components(wire, port, 2), Observer(), tier=elsewhere, reserve=0)
    for index in indices:
        req = request(index)
        req.req_pool_idx = index
        inbox._receivers[req.id] = _Receiver(req, torch.arange(8 * index, 8 * index + 8))
    return inbox, wire, port


def chunk(start: int, stop: int, name: str = "r0") -> tuple[str, Chunk]:
    return KV, Chunk(name, start, stop, (), METADATA if stop == 8 else None)


def landed(inbox: Inbox, wire: Wire, *chunks: tuple[str, Chunk]) -> list[str]:
    wire.heard += chunks
    inbox.receive_kv(0)
    return [entry.req.id for entry in inbox._ready]


def test_a_chunk_that_comes_twice_is_written_once() -> None:
    inbox, wire, port = expecting(0)
    assert landed(inbox, wire, chunk(0, 4), chunk(0, 4), chunk(4, 8), chunk(4, 8)) == ["r0"]
    assert port.written == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_request_begins_when_all_of_its_chunks_are_there() -> None:
    inbox, wire, port = expecting(0)
    assert landed(inbox, wire, chunk(4, 8)) == []
    assert landed(inbox, wire, chunk(0, 2)) == []
    assert landed(inbox, wire, chunk(2, 4)) == ["r0"]
    assert port.written == [[4, 5, 6, 7], [0, 1], [2, 3]]


def test_what_comes_for_nobody_is_written_nowhere() -> None:
    inbox, wire, port = expecting(0)
    assert landed(inbox, wire, chunk(0, 4, "r9")) == [] and port.written == []


def reasons(inbox: Inbox) -> dict[str, str]:
    return {req.id: reason for req, reason in inbox.take_failed()}


def test_requests_of_a_prefill_worker_that_is_gone_fail_with_room_or_without() -> None:
    inbox, wire, _ = expecting(0, 1)
    for index in (2, 3):
        inbox.enqueue(request(index))
    landed(inbox, wire, chunk(0, 8, "r0"))  # all of it had come
    inbox.fail_from({0: "it broke"})
    assert reasons(inbox) == {"r2": "prefill 0 is gone: it broke"}
    inbox.fail_from({1: "it broke too"})
    assert reasons(inbox) == {
        "r1": "prefill 1 is gone: it broke too",
        "r3": "prefill 1 is gone: it broke too",
    }
    assert inbox.num_waiting == 0 and [req.id for req in inbox.held] == ["r0"]


def test_what_does_not_come_is_waited_for_no_longer() -> None:
    inbox, _, _ = expecting(1)
    inbox.expire("nothing came")
    assert reasons(inbox) == {"r1": "not all of its KV came from prefill 1: nothing came"}
    assert not inbox.is_receiving


def test_a_prompt_that_was_given_up_before_there_was_room_fails() -> None:
    inbox, wire, _ = expecting()
    inbox.enqueue(request(4))
    wire.heard.append((KV, Failed("r4", "why not")))
    inbox.receive_kv(0)
    assert reasons(inbox) == {"r4": "why not"}


def sending() -> tuple[Outbox, Wire]:
    """A prefill worker with a request that waits for room, one that is sent, and one all of which is."""
    wire = Wire()
    outbox = Outbox(components(wire, Port(), 0), Observer(), overlapped=False)
    for index in (0, 2):
        outbox.enqueue(request(index))
    wire.heard.append((HANDSHAKE, Preallocated("r2", (1,))))
    outbox.receive_handshakes()
    outbox._transferring.append(_Transferring(_Sender(request(4), ()), None))
    return outbox, wire


def names(found: Sequence[Request]) -> list[str]:
    return [req.id for req in found]


def test_requests_of_a_decode_worker_that_is_gone_are_nobodys() -> None:
    outbox, _ = sending()
    assert names(outbox.take_orphaned({1: "another prefill worker"})) == names(outbox.sent_to({1})) == []
    assert names(outbox.take_orphaned({2: "the decode worker"})) == ["r0"] and not outbox.is_waiting
    assert names(outbox.sent_to({2})) == ["r2"]


def test_room_is_waited_for_no_longer_and_the_other_side_hears_of_it() -> None:
    outbox, wire = sending()
    [(req, why)] = outbox.expire("nothing came")
    assert (req.id, why) == ("r0", "decode 0 allocated no pages for it: nothing came")
    assert wire.sent == [(2, KV, Failed("r0", why))] and not outbox.is_waiting


def test_requests_are_all_that_is_there() -> None:
    outbox, _ = sending()
    assert names(outbox.requests) == ["r0", "r2", "r4"]
    inbox, wire, _ = expecting(0, 1)
    inbox.enqueue(request(2))
    landed(inbox, wire, chunk(0, 8, "r1"))
    assert names(inbox.requests) == ["r0", "r1", "r2"]
