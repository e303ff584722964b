"""A run in which no request advances ends with an error that says so."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from schedbench.cli.errors import WORKLOAD_FAILED, exit_code
from schedbench.cli.run import exit_code as exit_code_of_result
from schedbench.profiles.check.examine import run_ended
from schedbench.profiles.ranks.virtual_link import VirtualLink
from schedbench.profiles.run import runner, system
from schedbench.profiles.run.system import SHORTEST_WAIT, NoProgressError, ProgressWatch
from schedbench.sched.disagg.layout import KV
from schedbench.sched.loop.scheduler import Scheduler
from schedbench.sched.observe import NO_STEP, SLEEP, LogicalClock, StepInfo
from schedbench.sched.request import Request, Status
from tests.acceptance.runs import executed, resolved

FEW = ("workload.requests=3", "workload.arrival=burst", "measure.warmup_requests=0")


def receiving_only(scheduler: Scheduler) -> None:
    """A loop that never plans a step."""
    while True:
        scheduler.receive()


def polling(scheduler: Scheduler) -> None:
    """A loop that returns at once where it should wait."""
    while True:
        scheduler.receive()
        with scheduler.engine.observer.range(SLEEP, NO_STEP, 0):
            pass


def verifying_nothing(scheduler: Scheduler) -> None:
    """A loop whose steps give no request a token."""
    while True:
        scheduler.receive()
        info = StepInfo(scheduler.take_step(), "verify", 1, 1, steady=False)
        scheduler.engine.observer.launched(info)
        scheduler.engine.observer.settled(info)


@pytest.mark.parametrize(
    ("loop", "limit", "says"),
    [
        (receiving_only, "MOST_TURNS", "took 201 turns with 0 steps"),
        (polling, "MOST_TURNS", "took 201 turns with 0 steps"),
        (verifying_nothing, "MOST_STEPS", "201 steps"),
    ],
)
def test_a_loop_without_progress_ends(
    monkeypatch: pytest.MonkeyPatch, loop: Callable[[Scheduler], None], limit: str, says: str
) -> None:
    monkeypatch.setattr(runner, "run_overlapped", loop)
    monkeypatch.setattr(system, limit, 200)
    result = executed(resolved("mixed", *FEW), hazards=True)
    failure = result.run.failure
    assert failure is not None and failure.startswith("no request advances: since step 0") and says in failure
    assert "none of 3 unfinished requests got a token (r0 is waiting, with 0 tokens)" in failure
    assert exit_code_of_result(result) == WORKLOAD_FAILED
    for scripted in (False, True):
        ended = run_ended(result, scripted=scripted)
        assert ended.verdict == "failed" and "no request advances" in ended.evidence[0].says


def test_a_request_that_failed_fails_the_run() -> None:
    result = executed(resolved("mixed", *FEW))
    first, *others = result.requests
    rows = (first.model_copy(update={"status": "failed"}), *others)
    failed = result.model_copy(update={"requests": rows})
    assert (exit_code_of_result(result), exit_code_of_result(failed)) == (0, WORKLOAD_FAILED)


def test_a_warm_up_without_progress_is_a_failed_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "run_overlapped", receiving_only)
    monkeypatch.setattr(system, "MOST_TURNS", 200)
    question = resolved("mixed", *FEW[:2])
    with pytest.raises(NoProgressError) as stuck:
        executed(question)
    assert exit_code(stuck.value) == WORKLOAD_FAILED


def test_tokens_are_progress_and_equal_sums_of_other_requests_are_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request ends, and the others get as many tokens as it had: only the same requests' sums are compared."""
    monkeypatch.setattr(system, "MOST_STEPS", 5)
    ended, going = SimpleNamespace(output_ids=[]), SimpleNamespace(output_ids=[])
    found = [ended, going]
    watched: Any = SimpleNamespace(next_step=0, unfinished=lambda: found)
    watch = ProgressWatch(watched, LogicalClock())
    info = StepInfo(0, "decode", 1, 1, steady=True)

    def steps(count: int, tokens: int) -> None:
        for _ in range(count):
            watch.launched(info)
            going.output_ids.extend([0] * tokens)
            watch.range("receive", 0, 0)

    ended.output_ids.extend([0] * 6)
    steps(6, 0)
    found.remove(ended)
    watch.ended(cast(Request, ended))
    steps(6, 1)
    steps(60, 1)
    going.id, going.status = "r1", Status.RUNNING
    with pytest.raises(NoProgressError, match=r"6 steps.*\(r1 is running, with 66 tokens\)"):
        steps(12, 0)


def test_waiting_and_idle_ranks_count_as_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """One loop sleeps now and then, and another holds no request."""
    monkeypatch.setattr(system, "MOST_TURNS", 10)

    def loop(scheduler: Scheduler) -> None:
        watched = SimpleNamespace(next_step=0, unfinished=scheduler.unfinished)
        clock = LogicalClock()
        watch = ProgressWatch(watched, clock)
        for turn in range(100):
            watch.range("receive", 0, 0)
            if turn % 9 == 0:
                watch.range(SLEEP, NO_STEP, 0)
                clock.sleep_until(clock.now() + SHORTEST_WAIT)
        scheduler.waiting_queue = []
        for _ in range(100):
            watch.range("receive", 0, 0)

    monkeypatch.setattr(runner, "run_overlapped", loop)
    assert not executed(resolved("mixed", *FEW)).run.failure


def test_a_worker_that_polls_for_a_lost_message_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The requests whose KV a decode worker waits for have not ended."""
    wait = VirtualLink.wait
    polling = lambda link, tags, until: None if KV in tags else wait(link, tags, until)  # noqa: E731
    monkeypatch.setattr(VirtualLink, "wait", polling)
    monkeypatch.setattr(system, "MOST_TURNS", 2000)
    lost = "faults=[{link: [prefill 0, decode 0], tag: kv, does: drop, nth: 3}]"
    failure = executed(resolved("faults/parting", "engine.overlap=true", lost)).run.failure
    assert failure is not None and "no request advances" in failure
