"""Which stream waits for which, and when. A stream is here a list of its waits."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from schedbench.sched.batch import ScheduleBatch
from schedbench.sched.config import SamplingParams
from schedbench.sched.model.sampling import SamplingInfo
from schedbench.sched.relay.row import Relay
from schedbench.sched.streams import Streams
from tests.sched.loop.cpu_engine import PLAIN, config, request
from tests.sched.relay.test_bridge import batch, made


class StreamRecorder(list[str]):
    """A stream that records what it waits for."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def wait_stream(self, other: StreamRecorder) -> None:
        self.append(f"waits for {other.name}")

    def wait_event(self, event: EventStub) -> None:
        assert event.recorded
        self.append("waits for the event")


class EventStub:
    recorded = False

    def record(self) -> None:
        self.recorded = True


@pytest.fixture
def streams() -> Streams:
    module = SimpleNamespace(stream=lambda _: nullcontext(), Event=EventStub)
    return Streams(StreamRecorder("schedule"), StreamRecorder("forward"), StreamRecorder("copy"), module)


def launch(relay: Relay) -> ScheduleBatch:
    """Runs one decode in the order of the loop and returns the batch that a forward would read."""
    some = batch([4, 2], input_ids=None, lens=[10, 3])
    some.input_ids = None if relay.row.preparation == "fused" else torch.tensor([1, 1])
    some.sampling_info = SamplingInfo.from_requests(some.reqs, config=config())
    relay.barrier()
    with relay.isolate(some):
        relay.context.streams.schedule.append("forward runs")
    relay.reads_done(some)
    return some


@pytest.mark.parametrize(
    ("barrier", "waits"),
    [
        ("off", ["forward runs"]),
        ("top", ["waits for forward", "forward runs"]),
        ("after-launch", ["forward runs", "waits for forward"]),
        ("read-done", ["forward runs", "waits for the event"]),
    ],
)
@pytest.mark.parametrize("state", ["pr26020", "pr25945", "latest"])
def test_waits_of_the_schedule_stream(streams: Streams, state: str, barrier: str, waits: list[str]) -> None:
    launch(made(state, streams=streams, barrier=barrier))
    assert streams.schedule == waits
    assert streams.forward == ["waits for schedule"]


@pytest.mark.parametrize("state", ["pr26020", "latest"])
def test_with_read_done_a_forward_reads_its_own_pages(streams: Streams, state: str) -> None:
    relay = made(state, streams=streams, barrier="read-done")
    launch(relay)
    pages, table = relay.context.pages, relay.context.req_to_token
    assert pages is not table
    assert torch.equal(pages[4, :10], table[4, :10]) and torch.equal(pages[2, :3], table[2, :3])


@pytest.mark.parametrize("barrier", ["off", "top", "after-launch"])
def test_with_other_barriers_a_forward_reads_the_schedules_pages(streams: Streams, barrier: str) -> None:
    relay = made("latest", streams=streams, barrier=barrier)
    assert relay.context.pages is relay.context.req_to_token


def test_without_events_the_schedule_waits_for_the_whole_forward(streams: Streams) -> None:
    relay = made("latest", streams=streams)
    relay.context.config = config(capabilities=replace(PLAIN, events=False))
    launch(relay)
    assert streams.schedule == ["forward runs", "waits for forward"]


def info_of(exact: bool, **sampling: Any) -> SamplingInfo:
    req = request("r", [300], sampling=SamplingParams(**sampling))
    return SamplingInfo.from_requests([req], config=config(), exact=exact)


@pytest.mark.parametrize(
    ("penalties", "sampling", "waits"),
    [
        ("exact", {"presence_penalty": 1.0}, ["waits for forward"]),
        ("exact", {}, []),
        ("upstream", {"presence_penalty": 1.0}, []),
    ],
)
def test_rows_of_exact_penalties_change_after_the_forward(
    streams: Streams, penalties: str, sampling: dict[str, float], waits: list[str]
) -> None:
    relay = made("latest", streams=streams, penalties=penalties)
    relay.penalty_tokens.before_rows_change(info_of(penalties == "exact", **sampling))
    assert streams.schedule == waits
