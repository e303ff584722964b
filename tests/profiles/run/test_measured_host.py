"""Whole runs with measured host time: what the scheduler takes shows, what the tool takes does not."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from statistics import median

import pytest

from schedbench.profiles.judge.sides import LocalSide
from schedbench.profiles.judge.trial import Question, TrialRequest
from schedbench.profiles.judge.trials import TrialPlan, conduct
from schedbench.profiles.platform.resolve import ask
from schedbench.profiles.ranks.execute import Options, execute
from schedbench.profiles.record.result import Metric, Outputs, Result
from schedbench.profiles.record.timeline import Names, Window
from schedbench.profiles.run.machines import open_machine
from schedbench.profiles.run.passes import MeasuredRun, measured
from schedbench.profiles.run.runner import GatedSink, PreparedRun
from schedbench.sched.loop.scheduler import Scheduler
from schedbench.sched.observe import Observer, StepInfo

# What all of them look at is made once.
pytestmark = pytest.mark.xdist_group("measured host")

# Thirty decode steps at a batch that stays full.
STEADY = (
    "device.host=measured",
    "workload.requests=8",
    "workload.arrival={process: burst}",
    "workload.prompt_tokens={dist: fixed, value: 32}",
    "workload.output_tokens={dist: fixed, value: 30}",
    "measure.warmup_requests=4",
)
SILENCE = Observer()
TINY = ("model={preset: tiny-llama, dtype: float32}",)
ADDED, TOOL = 3_000_000, 5_000_000  # ns per step, far above the noise of a machine that others use
HIDDEN = 2_000_000  # half of the large model's forward: a scheduler several times slower than usual hides too


def busy(ns: int) -> None:
    end = time.thread_time_ns() + ns
    while time.thread_time_ns() < end:
        pass


def linger(scheduler: Scheduler, ns: int = ADDED) -> None:
    """Have the scheduler take longer at the top of each iteration."""
    relay = scheduler.engine.relay
    barrier = relay.barrier

    def late_barrier() -> None:
        busy(ns)
        barrier()

    scheduler.engine = replace(scheduler.engine, relay=replace(relay, barrier=late_barrier))


class BusyListener(Observer):
    """Part of the tool: takes per step more than the virtual GPU takes."""

    def settled(self, info: StepInfo) -> None:  # noqa: ARG002
        busy(TOOL)


class Ranges:
    """How long the ranges of each name were, ns."""

    def __init__(self) -> None:
        self.took: defaultdict[str, list[int]] = defaultdict(list)

    def begin(self) -> None:
        self.took.clear()

    def feed(self, window: Window) -> None:
        for one in window.ranges:
            self.took[one.name].append(one.end - one.start)

    def finish(self, names: Names) -> None: ...


def run(
    *overrides: str,
    listener: Observer = SILENCE,
    meddle: Callable[[Scheduler], None] = lambda _: None,
) -> MeasuredRun:
    question = ask("overlap_on", [*STEADY, *overrides])
    sink = GatedSink()
    with open_machine("vgpu", question, sink) as machine:
        bench = PreparedRun(question, machine, question.relays[0], sink)
        meddle(bench.scheduler)
        bench.warm_up()
        return measured(bench, bench.measure(lambda *_: nullcontext(listener)), save_tokens=False)


def value(found: MeasuredRun, name: str) -> float:
    metric = found.parts.metrics[name]
    assert isinstance(metric, Metric)
    return metric.values[0]


def median_step_us(found: MeasuredRun) -> float:
    metric = found.parts.metrics["step_ms"]
    assert isinstance(metric, Metric) and isinstance(metric.p50, float)
    return 1e3 * metric.p50


@pytest.fixture(scope="module")
def tiny() -> dict[str, MeasuredRun]:
    """Plain, with a scheduler and with a listener that take longer. Each is the quickest of some interleaved runs,
    for who else uses the machine's caches slows some down."""
    runs: dict[str, list[MeasuredRun]] = {"plain": [], "scheduler": [], "listener": []}
    for _ in range(2):
        runs["plain"].append(run(*TINY))
        runs["scheduler"].append(run(*TINY, meddle=linger))
        runs["listener"].append(run(*TINY, listener=BusyListener()))
    return {name: min(found, key=median_step_us) for name, found in runs.items()}


@pytest.fixture(scope="module")
def large() -> dict[str, list[MeasuredRun]]:
    """Some interleaved runs, plain and with a scheduler that takes longer."""
    runs: dict[str, list[MeasuredRun]] = {"plain": [], "scheduler": []}
    for _ in range(2):
        runs["plain"].append(run())
        runs["scheduler"].append(run(meddle=partial(linger, ns=HIDDEN)))
    return runs


def device_step_us(found: MeasuredRun) -> float:
    """From the start of one forward to that of the next, on average."""
    return 1e3 * value(found, "forward_ms") + value(found, "forward_idle_us_per_step")


def test_work_of_the_scheduler_is_exposed_where_the_device_has_nothing_to_do(
    tiny: dict[str, MeasuredRun],
) -> None:
    plain, slow = tiny["plain"], tiny["scheduler"]
    assert 1e3 * (median_step_us(slow) - median_step_us(plain)) == pytest.approx(ADDED, rel=0.2)
    more = value(slow, "exposed_host_us_per_step") - value(plain, "exposed_host_us_per_step")
    assert 1e3 * more == pytest.approx(ADDED, rel=0.3)


def test_work_of_the_scheduler_hides_behind_a_longer_forward(large: dict[str, list[MeasuredRun]]) -> None:
    """Who else uses the machine makes hosts later, so that they wait less, and devices wait for them: of each number
    the least disturbed run tells."""
    exposed = min(value(found, "exposed_host_us_per_step") for found in large["scheduler"])
    assert 1e3 * exposed < HIDDEN / 5
    plain, slow = (min(map(device_step_us, large[name])) for name in ("plain", "scheduler"))
    assert slow == pytest.approx(plain, rel=0.005)
    plain, slow = (
        max(value(found, "host_stall_us_per_step") for found in large[name])
        for name in ("plain", "scheduler")
    )
    assert 1e3 * (plain - slow) == pytest.approx(HIDDEN, rel=0.3)


def test_work_of_the_tool_is_nobodys(tiny: dict[str, MeasuredRun]) -> None:
    """It leaves the scheduler's caches a little colder, no more."""
    more = median_step_us(tiny["listener"]) - median_step_us(tiny["plain"])
    assert abs(1e3 * more) < TOOL / 4


def test_tokens_and_counts_are_those_of_modelled_time(large: dict[str, list[MeasuredRun]]) -> None:
    plain, modelled = large["plain"][0], run("device.host=modelled")
    assert isinstance(plain.outputs, Outputs)
    assert plain.outputs == modelled.outputs
    assert plain.parts.per_step == modelled.parts.per_step
    assert [row.count for row in plain.parts.copies] == [row.count for row in modelled.parts.copies]


def flattening_us(how: str) -> float:
    """Median time of putting prompts of 8192 tokens one behind the other."""
    ranges = Ranges()
    prompts = ("workload.prompt_tokens.value=2048", "workload.output_tokens.value=2", "workload.requests=16")
    question = ask("overlap_on", [*STEADY, *prompts, f"engine.relay.flatten={how}"])
    execute(question, question.relays[0], Options(device="vgpu"), extra_sink=ranges)
    (took,) = (took for name, took in ranges.took.items() if name.startswith("flatten"))
    return median(took) / 1e3


def test_numpy_flattens_prompts_faster_than_a_list() -> None:
    """What #25098 changed, seen without a GPU."""
    assert 5 * flattening_us("numpy") < flattening_us("list")


def test_idle_time_is_accounted_for(tiny: dict[str, MeasuredRun]) -> None:
    """The identities of the waiting metrics hold on a clock that nobody declared."""
    idle = tiny["plain"].parts.idle
    assert idle.residue_us == 0
    assert 0 < idle.unnamed_host_us < idle.host_late_us


def results(*overrides: str) -> Sequence[Result]:
    question = ask("overlap_on", [*STEADY, *TINY, *overrides])
    return [execute(question, question.relays[0], Options(device="vgpu")).result for _ in range(2)]


def test_measured_runs_are_marked_and_never_exact() -> None:
    first, second = results("workload.output_tokens.value=20")
    assert (first.labels.emulated, first.labels.host) == (True, "measured")
    assert not any(metric.exact for metric in first.metrics.values() if isinstance(metric, Metric))
    assert first.outputs == second.outputs
    assert first.metrics["step_ms"] != second.metrics["step_ms"]


def test_measured_runs_are_compared_in_interleaved_blocks() -> None:
    question = Question.of("overlap_on", [*STEADY, *TINY, "workload.output_tokens.value=8"])
    a, b = (
        LocalSide(name, question, TrialRequest((f"engine.overlap={name}",), device="vgpu"))
        for name in ("true", "false")
    )
    trials = conduct(a, b, TrialPlan(pairs=2, varied=frozenset({"engine.overlap"})), lambda *_: None)
    assert (trials.design, len(trials.a), len(trials.b)) == ("blocks", 2, 2)
