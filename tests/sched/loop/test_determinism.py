"""A seed determines a run: three runs have one trace of launches and their requests."""

from __future__ import annotations

from typing import Any

import pytest

from schedbench.sched.loop.scheduler import Scheduler
from tests.sched.loop.cpu_engine import LOOPS, EngineRun, RunRecorder, config, outputs, request, requests

Trace = list[tuple[int, str, tuple[str, ...]]]


class Tracer(RunRecorder):
    """Also records which requests each launch had."""

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
    engine_run = EngineRun(config(**setup), recall=True, observer=tracer, watch=tracer.look)
    done = engine_run.run(requests(14, prompt=(4, 90), output=(2, 16), every_ns=4000))
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
def test_three_runs_have_one_trace(setup: dict[str, Any]) -> None:
    first = trace(**setup)
    assert len(first[0]) > 10
    assert all(trace(**setup) == first for _ in range(2))


def test_another_seed_gives_another_order() -> None:
    crowded = {"policy": "random", "max_running_requests": 2}
    assert trace(**crowded, seed=1)[0] != trace(**crowded, seed=2)[0]


@LOOPS
def test_steps_are_numbered_and_announced_once(overlap: bool) -> None:
    recorder = RunRecorder()
    EngineRun(config(overlap=overlap, mixed_chunk=True), recall=True, observer=recorder).run(requests(9))
    assert [info.step for info in recorder.launches] == list(range(len(recorder.launches)))
    assert [info[:4] for info in recorder.settled_steps] == [info[:4] for info in recorder.launches]


def test_a_step_is_steady_when_no_request_joins_or_ends() -> None:
    recorder = RunRecorder()
    together = requests(3, prompt=(8, 9), output=(6, 7))
    EngineRun(config(), recall=True, observer=recorder).run(together)
    kinds = [(info.kind, info.steady) for info in recorder.settled_steps]
    # All join in the first decode and end in the last but one; overlap launches one step more.
    joining, ending, surplus = [("decode", False)] * 3
    assert kinds == [("prefill", False), joining, *[("decode", True)] * 3, ending, surplus]


def test_a_step_with_a_joining_request_is_not_steady() -> None:
    recorder = RunRecorder()
    long, late = request("long", range(300, 320), 12), request("late", range(400, 420), 3, arrival=5000)
    EngineRun(config(), recall=True, observer=recorder).run([long, late])
    decodes = [(info.batch_size, info.steady) for info in recorder.settled_steps if info.kind == "decode"]
    joined = decodes.index((2, False))
    # late joins; it ends; overlap launches one step more with it; it is filtered out
    assert decodes[joined : joined + 5] == [(2, False), (2, False), (2, False), (1, False), (1, True)]
