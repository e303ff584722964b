"""Pauses, the abort of all requests and flushes: between two steps, in both loops, in every state of the relay."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager
from functools import partial

import pytest

from schedbench.profiles.check.examine import Examiner
from schedbench.scenarios.loader import load
from schedbench.sched.loop.event_loops import ABORTED
from schedbench.sched.observe import SLEEP
from schedbench.sched.relay.choice import choose
from schedbench.sched.relay.states import states
from tests.acceptance.runs import InFlight, digest_observed, known_result, resolved, result_of, value
from tests.scenarios.refusals import refused

LOOPS = ("engine.overlap=true", "engine.overlap=false")
NONE = "device.values=none"
UNCONTROLLED = "workload.controls=[]"
FEW = (NONE, "workload.requests=10", "measure.warmup_requests=0")
PAUSES = ("pause", "pause_and_settle", "pause_and_retract")


def controls(*entries: tuple[str, int]) -> str:
    """Returns the override for a script; pauses last 0.1 ms."""
    parts = [
        f"{{action: {action}, at: {at}{', ms: 0.1' if action in PAUSES else ''}}}" for action, at in entries
    ]
    return f"workload.controls=[{', '.join(parts)}]"


plain = partial(known_result, "pause", UNCONTROLLED, "engine.overlap=false", "engine.relay=latest")


@pytest.mark.wide
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("state", states())
def test_a_pause_changes_no_token_in_any_state(loop: str, state: str) -> None:
    result = result_of("pause", *FEW, loop, f"engine.relay={state}", hazards=True)
    assert result.outputs == plain(*FEW).outputs
    assert value(result, "retractions") > 0


@pytest.mark.wide
@pytest.mark.parametrize(
    "mode",
    [
        "device.values=real",
        "engine.page_size=16",
        "device.hardware=mlx-like",
        "workload.sampling.logprobs=true",
        "workload.sampling.grammar={regex: '[0-9]{1,8}'}",
    ],
)
def test_a_pause_changes_no_token_in_any_mode(mode: str) -> None:
    real = ("device.values=real", "workload.requests=4", "measure.warmup_requests=0", mode)
    assert result_of("pause", *real, hazards=True).outputs == plain(*real).outputs


@pytest.mark.wide
@pytest.mark.parametrize("scenario", ["spec_v1", "spec_v2", "hisparse", "embedding", "penalties"])
@pytest.mark.parametrize("state", ["latest", "pr25945"])
def test_a_pause_changes_no_token_of_another_scenario(scenario: str, state: str) -> None:
    few = ("workload.requests=3", "measure.warmup_requests=0", f"engine.relay={state}")
    short = () if scenario == "embedding" else ("workload.output_tokens={dist: uniform, min: 6, max: 12}",)
    paused = controls(("pause", 1), ("pause_and_settle", 2), ("pause_and_retract", 4))
    pausing = result_of(scenario, *few, *short, paused, hazards=True)
    assert pausing.outputs == result_of(scenario, *few, *short).outputs


@pytest.mark.wide
def test_any_sequence_of_pauses_keeps_invariants_and_tokens() -> None:
    """The invariants hold after each pause (upstream's test of tensor consistency), and no token changes."""
    drawn = random.Random(0)
    for _ in range(8):
        script = [(drawn.choice(PAUSES), drawn.randrange(24)) for _ in range(drawn.randint(2, 6))]
        state, loop = drawn.choice(list(states())), drawn.choice(LOOPS)
        short = "workload.output_tokens={dist: uniform, min: 1, max: 8}"
        found = result_of("pause", *FEW, short, loop, f"engine.relay={state}", controls(*script))
        assert found.outputs == plain(*FEW, short).outputs, (script, state, loop)


class AtSleep(InFlight):
    """Records how many results were unsettled at each sleep."""

    def __init__(self) -> None:
        self.at_sleep: list[int] = []

    def range(self, name: str, step: int, size: int) -> AbstractContextManager[object]:
        if name == SLEEP:
            self.at_sleep.append(self.unsettled)
        return super().range(name, step, size)


@pytest.mark.parametrize(("loop", "left"), [(LOOPS[0], [1, 0, 0]), (LOOPS[1], [0, 0, 0])])
def test_a_pause_alone_leaves_a_result_in_flight(loop: str, left: list[int]) -> None:
    seen = AtSleep()
    digest_observed(resolved("pause", *FEW, loop), lambda *_: seen)
    assert seen.at_sleep[:3] == left


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("before", ["pause", "pause_and_retract"])
def test_all_requests_are_aborted_with_the_tokens_they_had(loop: str, before: str) -> None:
    script = controls((before, 5), ("abort_all", 5))
    result = result_of("pause", *FEW, loop, script, "engine.relay=latest", hazards=True)
    whole = {row.id: row for row in plain(*FEW).requests}
    aborted = [row for row in result.requests if row.status == "aborted"]
    assert {row.reason for row in aborted} == {ABORTED}
    assert len(aborted) >= 8  # of as many clients
    assert any(row.output_tokens for row in aborted)
    for row in result.requests:
        assert row.token_ids == (whole[row.id].token_ids or ())[: row.output_tokens]
        assert row.output_tokens < whole[row.id].output_tokens or row.status == "finished"


def test_check_compares_the_tokens_until_an_abort() -> None:
    question = resolved("pause", *FEW, controls(("abort_all", 5)))
    report = Examiner(question, ()).examine(choose("latest", {}))
    assert not report.failed
    tokens = next(check for check in report.checks if check.name == "tokens")
    assert tokens.verdict == "passed"


def test_a_control_that_the_run_does_not_come_to_is_reported() -> None:
    question = resolved("pause", *FEW, controls(("flush", 9999), ("pause", 3)))
    report = Examiner(question, ()).examine(choose("latest", {}))
    run = next(check for check in report.checks if check.name == "run")
    assert [one.says for one in run.evidence] == ["did not happen: flush before batch 9999"]
    assert report.failed and report.result is not None
    assert report.result.document()["conclusion"].startswith("did not happen: flush before batch 9999; ")


SPACED = (*FEW, "workload.arrival={process: constant, rate: 50}", "workload.requests=4")


@pytest.mark.parametrize("loop", LOOPS)
def test_a_flush_waits_until_the_engine_is_idle(loop: str) -> None:
    """A request ends before the next one arrives, whose prefix would be cached without the flush."""
    kept = value(result_of("pause", *SPACED, loop, UNCONTROLLED), "cache_hit_ratio")
    once = value(result_of("pause", *SPACED, loop, controls(("flush", 1))), "cache_hit_ratio")
    often = controls(*(("flush", at) for at in range(0, 100, 4)))
    assert kept > once > value(result_of("pause", *SPACED, loop, often), "cache_hit_ratio") == 0


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{action: pause, at: 1}", "required with pause"),
        ("{action: flush, at: 1, ms: 2}", "means nothing with flush"),
        ("{action: halt, at: 1}", "expected pause"),
        ("{action: pause, ms: 1}", "required"),
    ],
)
def test_an_error_names_its_key(entry: str, message: str) -> None:
    [problem] = refused(load, "pause", [f"workload.controls=[{entry}]"])
    assert problem.startswith("--set: workload.controls.0.") and message in problem
