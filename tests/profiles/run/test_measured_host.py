"""Whole runs with measured host time: the scheduler's time counts, the tool's does not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from statistics import median
from unittest.mock import patch

import pytest

from schedbench.profiles.judge.local import LocalSide
from schedbench.profiles.judge.trials import Question, TrialPlan, TrialRequest, conduct
from schedbench.profiles.platform.resolve import ask
from schedbench.profiles.ranks.execute import Options, execute
from schedbench.profiles.record.result import IdlePart, Metric, Outputs, Result
from schedbench.profiles.record.timeline import Names, Window
from schedbench.profiles.run.document import MeasuredRun, measured
from schedbench.profiles.run.machines import open_machine
from schedbench.profiles.run.runner import GatedSink, PreparedRun
from schedbench.profiles.vgpu import host_time
from schedbench.sched.loop.scheduler import Scheduler
from schedbench.sched.observe import Observer, StepInfo
from tests.acceptance.runs import executed

# Runs that several tests examine are made once.
pytestmark = [pytest.mark.wide, pytest.mark.xdist_group("measured host")]

# Thirty decode steps at a batch that stays full.
STEADY = (
    "device.host=measured",
    "workload.requests=8",
    "workload.arrival={process: burst}",
    "workload.prompt_tokens={dist: fixed, value: 32}",
    "workload.output_tokens={dist: fixed, value: 30}",
    "measure.warmup_requests=4",
)
TINY = ("model={preset: tiny-llama, dtype: float32}",)
ADDED, TOOL = 3_000_000, 5_000_000  # ns per step
HIDDEN = 2_000_000  # half of the large model's forward


class ScriptedClock:
    """Stands for the machine's clocks. It advances by a microsecond per reading and by what a test adds, so that other
    work on the machine has no effect."""

    def __init__(self) -> None:
        self._now = 0

    def add(self, ns: int) -> None:
        self._now += ns

    def perf_counter_ns(self) -> int:
        self._now += 1_000
        return self._now

    thread_time_ns = perf_counter_ns


def slow_down(ns: int, clock: ScriptedClock, scheduler: Scheduler) -> None:
    """Makes the scheduler take longer at the top of each iteration."""
    relay = scheduler.engine.relay
    barrier = relay.barrier

    def late_barrier() -> None:
        clock.add(ns)
        barrier()

    scheduler.engine = replace(scheduler.engine, relay=replace(relay, barrier=late_barrier))


class SlowObserver(Observer):
    """A part of the tool that takes more time per step than the virtual GPU."""

    def __init__(self, clock: ScriptedClock) -> None:
        self._clock = clock

    def settled(self, info: StepInfo) -> None:  # noqa: ARG002
        self._clock.add(TOOL)


class Ranges:
    """Records the durations of the ranges by name, ns."""

    def __init__(self) -> None:
        self.took: defaultdict[str, list[int]] = defaultdict(list)

    def begin(self) -> None:
        self.took.clear()

    def feed(self, window: Window) -> None:
        for one in window.ranges:
            self.took[one.name].append(one.end - one.start)

    def finish(self, names: Names) -> None: ...


def run(*overrides: str, scheduler_ns: int = 0, slow_observer: bool = False) -> MeasuredRun:
    question, sink, clock = ask("overlap_on", [*STEADY, *overrides]), GatedSink(), ScriptedClock()
    with (
        patch.object(host_time, "time", clock),
        open_machine("vgpu", question, sink) as machine,
    ):
        bench = PreparedRun(question, machine, sink)
        slow_down(scheduler_ns, clock, bench.scheduler)
        bench.warm_up()
        observer = SlowObserver(clock) if slow_observer else Observer()
        return measured(bench, lambda *_: nullcontext(observer))


def value(found: MeasuredRun, name: str) -> float:
    metric = found.parts.metrics[name]
    assert isinstance(metric, Metric)
    return metric.values[0]


def median_step_us(found: MeasuredRun) -> float:
    metric = found.parts.metrics["step_ms"]
    assert isinstance(metric, Metric) and isinstance(metric.p50, float)
    return 1e3 * metric.p50


def device_step_us(found: MeasuredRun) -> float:
    """Returns the average time from the start of one forward to that of the next."""
    return 1e3 * value(found, "forward_ms") + value(found, "forward_idle_us_per_step")


@pytest.fixture(scope="module")
def tiny() -> MeasuredRun:
    return run(*TINY)


@pytest.fixture(scope="module")
def large() -> MeasuredRun:
    return run()


def test_scheduler_time_is_exposed_where_the_device_is_idle(tiny: MeasuredRun) -> None:
    slow = run(*TINY, scheduler_ns=ADDED)
    assert 1e3 * (median_step_us(slow) - median_step_us(tiny)) == pytest.approx(ADDED, rel=0.01)
    more = value(slow, "exposed_host_us_per_step") - value(tiny, "exposed_host_us_per_step")
    assert 1e3 * more == pytest.approx(ADDED, rel=0.05)


def test_scheduler_time_is_hidden_by_a_longer_forward(large: MeasuredRun) -> None:
    slow = run(scheduler_ns=HIDDEN)
    exposed = value(slow, "exposed_host_us_per_step") - value(large, "exposed_host_us_per_step")
    assert 1e3 * exposed < HIDDEN / 20
    assert device_step_us(slow) == pytest.approx(device_step_us(large), rel=0.005)
    less = value(large, "host_stall_us_per_step") - value(slow, "host_stall_us_per_step")
    assert 1e3 * less == pytest.approx(HIDDEN, rel=0.05)


def test_observer_time_is_not_counted(tiny: MeasuredRun) -> None:
    assert median_step_us(run(*TINY, slow_observer=True)) == median_step_us(tiny)


def test_tokens_and_counts_equal_those_with_modelled_time(large: MeasuredRun) -> None:
    plain, modelled = large, run("device.host=modelled")
    assert isinstance(plain.outputs, Outputs)
    assert plain.outputs == modelled.outputs
    assert plain.parts.per_step == modelled.parts.per_step
    assert [row.count for row in plain.parts.copies] == [row.count for row in modelled.parts.copies]


def flattening_us(how: str) -> float:
    """Returns the median time of concatenating prompts of 8192 tokens."""
    ranges = Ranges()
    prompts = ("workload.prompt_tokens.value=2048", "workload.output_tokens.value=2", "workload.requests=16")
    question = ask("overlap_on", [*STEADY, *prompts, f"engine.relay.flatten={how}"])
    execute(question, Options(device="vgpu"), extra_sinks=[ranges])
    (took,) = (took for name, took in ranges.took.items() if name.startswith("flatten"))
    return median(took) / 1e3


def test_numpy_flattens_prompts_faster_than_a_list() -> None:
    """This is the effect of #25098, measured without a GPU."""
    assert 5 * flattening_us("numpy") < flattening_us("list")


def results(*overrides: str) -> Sequence[Result]:
    question = ask("overlap_on", [*STEADY, *TINY, *overrides])
    return [executed(question) for _ in range(2)]


def test_measured_runs_are_labelled_and_never_exact() -> None:
    first, second = results("workload.output_tokens.value=20")
    assert (first.labels.emulated, first.labels.host) == (True, "measured")
    assert not any(metric.exact for metric in first.metrics.values() if isinstance(metric, Metric))
    assert first.outputs == second.outputs
    assert first.metrics["step_ms"] != second.metrics["step_ms"]
    assert isinstance(first.idle, IdlePart)
    assert first.idle.residue_us == 0
    assert 0 < first.idle.unnamed_host_us < first.idle.host_late_us


def test_measured_runs_are_compared_in_interleaved_blocks() -> None:
    question = Question.of("overlap_on", [*STEADY, *TINY, "workload.output_tokens.value=8"])
    a, b = (
        LocalSide(name, question, TrialRequest((f"engine.overlap={name}",), device="vgpu"))
        for name in ("true", "false")
    )
    trials = conduct(a, b, TrialPlan(pairs=2, varied=frozenset({"engine.overlap"})), lambda *_: None)
    assert (trials.design, len(trials.a), len(trials.b)) == ("blocks", 2, 2)
