"""A seed is a run: ten runs, one trace of what was launched, with whom."""

from __future__ import annotations

from typing import Any

import pytest

from schedbench.sched.loop.scheduler import Scheduler
from tests.sched.loop.cpu_engine import GREEDY, Memoirs, Room, config, outputs, request, requests

Trace = list[tuple[int, str, tuple[str, ...]]]


class Tracer(Memoirs):
    """Also remembers which requests each launch had."""

    def __init__(self) -> None:
        super().__init__()
        self.trace: Trace = []

    def look(self, scheduler: Scheduler) -> None:
        if scheduler.last_batch is not None:
            info = self.launches[-1]
            ids = tuple(req.id for req in scheduler.last_batch.reqs)
            self.trace.append((info.step, info.kind, ids))


def trace(**setup: Any) -> tuple[Trace, dict[str, list[int]]]:
    tracer = Tracer()
    room = Room(config(**setup), recall=True, observer=tracer, watch=tracer.look)
    done = room.run(requests(14, prompt=(4, 90), output=(2, 16), every_ns=4000, sampling=GREEDY))
    return tracer.trace, outputs(done)


@pytest.mark.parametrize(
    "setup",
    [
        {"policy": "random"},
        {"policy": "random", "overlap": False},
        {"policy": "lpm", "mixed_chunk": True, "chunked_prefill_size": 19, "page_size": 4},
        {"kv_tokens": 256, "schedule_conservativeness": 0.02, "mixed_chunk": True},
    ],
    ids=str,
)
def test_ten_runs_have_one_trace(setup: dict[str, Any]) -> None:
    first = trace(**setup)
    assert len(first[0]) > 10
    assert all(trace(**setup) == first for _ in range(9))


def test_another_seed_is_another_order() -> None:
    crowded = {"policy": "random", "max_running_requests": 2}
    assert trace(**crowded, seed=1)[0] != trace(**crowded, seed=2)[0]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "serial"])
def test_steps_are_numbered_and_announced_once(overlap: bool) -> None:
    memoirs = Memoirs()
    Room(config(overlap=overlap, mixed_chunk=True), recall=True, observer=memoirs).run(requests(9))
    assert [info.step for info in memoirs.launches] == list(range(len(memoirs.launches)))
    assert [info[:4] for info in memoirs.settled_steps] == [info[:4] for info in memoirs.launches]


def test_steady_is_when_nobody_joins_or_ends() -> None:
    memoirs = Memoirs()
    together = requests(3, prompt=(8, 9), output=(6, 7))
    Room(config(), recall=True, observer=memoirs).run(together)
    kinds = [(info.kind, info.steady) for info in memoirs.settled_steps]
    # All join in the first decode and end in the last but one. Overlapped, one more step carries them to no end.
    joining, ending, carried = [("decode", False)] * 3
    assert kinds == [("prefill", False), joining, *[("decode", True)] * 3, ending, carried]


def test_a_step_that_somebody_joins_is_not_steady() -> None:
    memoirs = Memoirs()
    long, late = request("long", range(300, 320), 12), request("late", range(400, 420), 3, arrival=5000)
    Room(config(), recall=True, observer=memoirs).run([long, late])
    decodes = [(info.batch_size, info.steady) for info in memoirs.settled_steps if info.kind == "decode"]
    joined = decodes.index((2, False))
    # late joins; it ends; one step more carries it to no end; it is filtered out
    assert decodes[joined : joined + 5] == [(2, False), (2, False), (2, False), (1, False), (1, True)]
