"""Which stream is made to wait for which, and when: a stream here is a list of what it was told."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from schedbench.sched.batch import ScheduleBatch
from schedbench.sched.config import SamplingParams
from schedbench.sched.model.sampling_info import SamplingInfo
from schedbench.sched.relay.choice import choose
from schedbench.sched.relay.row import Relay
from schedbench.sched.streams import Streams
from tests.sched.loop.cpu_engine import PLAIN, Memoirs, config, request
from tests.sched.relay.test_bridge import batch


class Line(list[str]):
    """A stream that writes down what it waits for."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def wait_stream(self, other: Line) -> None:
        self.append(f"waits for {other.name}")

    def wait_event(self, event: Mark) -> None:
        assert event.recorded
        self.append("waits for the mark")


class Mark:
    recorded = False

    def record(self) -> None:
        self.recorded = True


@pytest.fixture
def streams() -> Streams:
    module = SimpleNamespace(stream=lambda _: nullcontext(), Event=Mark)
    return Streams(Line("schedule"), Line("forward"), Line("copy"), module)


def made(streams: Streams, state: str, **switches: str) -> Relay:
    return Relay.of(
        choose(state, switches).row(overlap=True),
        config(),
        streams=streams,
        observer=Memoirs(),
        req_to_token=torch.arange(9 * 64, dtype=torch.int32).view(9, 64),
    )


def launch(relay: Relay) -> ScheduleBatch:
    """One decode, asked in the loop's order. At the end stands what a forward would read."""
    some = batch([4, 2], input_ids=None, lens=[10, 3])
    some.input_ids = None if relay.row.preparation == "fused" else torch.tensor([1, 1])
    some.sampling_info = SamplingInfo.from_requests(some.reqs, config=config())
    relay.barrier()
    with relay.isolate(some):
        relay.context.streams.schedule.append("forward runs")
    relay.reads_done(some)
    return some


@pytest.mark.parametrize(
    ("barrier", "told"),
    [
        ("off", ["forward runs"]),
        ("top", ["waits for forward", "forward runs"]),
        ("after-launch", ["forward runs", "waits for forward"]),
        ("read-done", ["forward runs", "waits for the mark"]),
    ],
)
@pytest.mark.parametrize("state", ["pr26020", "pr25945", "latest"])
def test_what_the_schedule_waits_for(streams: Streams, state: str, barrier: str, told: list[str]) -> None:
    launch(made(streams, state, barrier=barrier))
    assert streams.schedule == told
    assert streams.forward == ["waits for schedule"]


@pytest.mark.parametrize("state", ["pr26020", "latest"])
def test_behind_the_mark_a_forward_reads_its_own_pages(streams: Streams, state: str) -> None:
    relay = made(streams, state, barrier="read-done")
    launch(relay)
    pages, table = relay.context.pages, relay.context.req_to_token
    assert pages is not table
    assert torch.equal(pages[4, :10], table[4, :10]) and torch.equal(pages[2, :3], table[2, :3])


@pytest.mark.parametrize("barrier", ["off", "top", "after-launch"])
def test_else_it_reads_the_schedules(streams: Streams, barrier: str) -> None:
    relay = made(streams, "latest", barrier=barrier)
    assert relay.context.pages is relay.context.req_to_token


def test_without_events_the_whole_forward_is_waited_for(streams: Streams) -> None:
    relay = made(streams, "latest")
    relay.context.config = config(capabilities=replace(PLAIN, events=False))
    launch(relay)
    assert streams.schedule == ["forward runs", "waits for forward"]


def info_of(exact: bool, **sampling: Any) -> SamplingInfo:
    req = request("r", [300], sampling=SamplingParams(**sampling))
    return SamplingInfo.from_requests([req], config=config(), exact=exact)


@pytest.mark.parametrize(
    ("penalties", "sampling", "told"),
    [
        ("exact", {"presence_penalty": 1.0}, ["waits for forward"]),
        ("exact", {}, []),
        ("upstream", {"presence_penalty": 1.0}, []),
    ],
)
def test_rows_of_counted_penalties_change_behind_the_forward(
    streams: Streams, penalties: str, sampling: dict[str, float], told: list[str]
) -> None:
    relay = made(streams, "latest", penalties=penalties)
    relay.penalty_tokens.before_rows_change(info_of(penalties == "exact", **sampling))
    assert streams.schedule == told
