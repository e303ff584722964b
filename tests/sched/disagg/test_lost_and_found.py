"""Each side of a KV transfer alone: chunks that come twice, late or never, and ranks that are gone."""

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
from schedbench.sched.disagg.layout import HANDSHAKE, KV, Chunk, Failed, Metadata, Preallocated, RankLayout
from schedbench.sched.disagg.outbox import Outbox, _Sender
from schedbench.sched.observe import Observer
from schedbench.sched.request import Request
from tests.sched.disagg.test_requests_and_places import ListLink

METADATA = Metadata(7, (), 0, None, None)


class SlotRecorder:
    """Records the slots that are written."""

    def __init__(self) -> None:
        self.written: list[list[int]] = []

    def scatter(self, span: PageTableSpan, values: Sequence[torch.Tensor]) -> None:  # noqa: ARG002
        self.written.append(span.slots.tolist())


class Event:
    def record(self) -> None: ...


def components(link: ListLink, written_slots: SlotRecorder, rank: int) -> DisaggComponents:
    module = SimpleNamespace(Stream=lambda: SimpleNamespace(stream_id=9), Event=Event)
    streams = SimpleNamespace(module=module, on=lambda _: nullcontext())
    place = RankLayout(rank, prefill=2, decode=1)
    return DisaggComponents(place, link, written_slots, None, streams)  # type: ignore[arg-type]


def request(index: int) -> Request:
    return Request(f"r{index}", array("q", range(8)), SamplingParams(max_new_tokens=4), 0, index)


def expecting(*indices: int) -> tuple[Inbox, ListLink, SlotRecorder]:
    """Returns a decode worker that has allocated pages for prompts of eight tokens."""
    link, written_slots = ListLink(), SlotRecorder()
    elsewhere: Any = SimpleNamespace(can_offload=True, has_room=lambda _: True, expect=lambda _: None)
    inbox = Inbox(components(link, written_slots, 2), Observer(), tier=elsewhere, reserve=0)
    for index in indices:
        req = request(index)
        req.req_pool_idx = index
        inbox._receivers[req.id] = _Receiver(req, torch.arange(8 * index, 8 * index + 8))
    return inbox, link, written_slots


def chunk(start: int, stop: int, name: str = "r0") -> tuple[str, Chunk]:
    return KV, Chunk(name, start, stop, (), METADATA if stop == 8 else None)


def received(inbox: Inbox, link: ListLink, *chunks: tuple[str, Chunk]) -> list[str]:
    link.incoming += chunks
    inbox.receive_kv(0)
    return [entry.req.id for entry in inbox._ready]


def test_a_chunk_that_comes_twice_is_written_once() -> None:
    inbox, link, written_slots = expecting(0)
    assert received(inbox, link, chunk(0, 4), chunk(0, 4), chunk(4, 8), chunk(4, 8)) == ["r0"]
    assert written_slots.written == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_request_begins_when_all_of_its_chunks_are_there() -> None:
    inbox, link, written_slots = expecting(0)
    assert received(inbox, link, chunk(4, 8)) == []
    assert received(inbox, link, chunk(0, 2)) == []
    assert received(inbox, link, chunk(2, 4)) == ["r0"]
    assert written_slots.written == [[4, 5, 6, 7], [0, 1], [2, 3]]


def test_a_chunk_of_an_unknown_request_is_not_written() -> None:
    inbox, link, written_slots = expecting(0)
    assert received(inbox, link, chunk(0, 4, "r9")) == [] and written_slots.written == []


def reasons(inbox: Inbox) -> dict[str, str]:
    return {req.id: reason for req, reason in inbox.take_failed()}


def test_requests_of_a_lost_prefill_worker_fail_with_or_without_pages() -> None:
    inbox, link, _ = expecting(0, 1)
    for index in (2, 3):
        inbox.enqueue(request(index))
    received(inbox, link, chunk(0, 8, "r0"))  # all of it had come
    inbox.fail_from({0: "it broke"})
    assert reasons(inbox) == {"r2": "prefill 0 is gone: it broke"}
    inbox.fail_from({1: "it broke too"})
    assert reasons(inbox) == {
        "r1": "prefill 1 is gone: it broke too",
        "r3": "prefill 1 is gone: it broke too",
    }
    assert inbox.num_waiting == 0 and [req.id for req in inbox.held] == ["r0"]


def test_kv_that_never_comes_expires() -> None:
    inbox, _, _ = expecting(1)
    inbox.expire("nothing came")
    assert reasons(inbox) == {"r1": "not all of its KV came from prefill 1: nothing came"}
    assert not inbox.is_receiving


def test_a_prompt_dropped_before_its_pages_are_allocated_fails() -> None:
    inbox, link, _ = expecting()
    inbox.enqueue(request(4))
    link.incoming.append((KV, Failed("r4", "why not")))
    inbox.receive_kv(0)
    assert reasons(inbox) == {"r4": "why not"}


def sending() -> tuple[Outbox, ListLink]:
    """Returns a prefill worker with one request without pages, one being sent, and one that is sent completely."""
    link = ListLink()
    outbox = Outbox(components(link, SlotRecorder(), 0), Observer(), overlapped=False)
    for index in (0, 2):
        outbox.enqueue(request(index))
    link.incoming.append((HANDSHAKE, Preallocated("r2", (1,))))
    outbox.receive_handshakes()
    outbox._transferring.append(_Sender(request(4), ()))
    return outbox, link


def names(found: Sequence[Request]) -> list[str]:
    return [req.id for req in found]


def test_requests_of_a_lost_decode_worker_are_orphaned() -> None:
    outbox, _ = sending()
    assert names(outbox.take_orphaned({1: "another prefill worker"})) == names(outbox.sent_to({1})) == []
    assert names(outbox.take_orphaned({2: "the decode worker"})) == ["r0"] and not outbox.is_waiting
    assert names(outbox.sent_to({2})) == ["r2"]


def test_a_request_without_pages_expires_and_reports_its_failure() -> None:
    outbox, link = sending()
    [(req, why)] = outbox.expire("nothing came")
    assert (req.id, why) == ("r0", "decode 0 allocated no pages for it: nothing came")
    assert link.sent == [(2, KV, Failed("r0", why))] and not outbox.is_waiting


def test_requests_lists_those_of_every_phase() -> None:
    outbox, _ = sending()
    assert names(outbox.requests) == ["r0", "r2", "r4"]
    inbox, link, _ = expecting(0, 1)
    inbox.enqueue(request(2))
    received(inbox, link, chunk(0, 8, "r1"))
    assert names(inbox.requests) == ["r0", "r1", "r2"]
