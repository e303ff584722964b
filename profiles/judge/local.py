"""Runs that happen in this process, or in that of an engine: of a side, and of one question on several hardware
profiles, such as the draws of one, from which the ranges of its figures follow.

The margin of the scores at a token is found by one more run that scores every token. Scoring adds a kernel to each
step, so that the times of this run are meaningless. On the virtual GPU its tokens are those of the run that it repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from ...scenarios import checks, combinations
from ...scenarios.schema import Scenario
from ...sched.batch import ModelOutput
from ...sched.kernels.sampling import row_seed
from ...sched.model.sampling import Sampler, SamplingInfo
from ..platform.machine import MachineError
from ..platform.pool import MapFunction, pool, saves_time
from ..platform.resolve import Resolved
from ..ranks.execute import Options, execute, whole
from ..record.result import RangePart, RangesPart, Result
from ..run.crash import exits_are_crashes
from ..run.machines import DeviceChoice, device_kind, open_machine
from ..run.runner import GatedSink, PreparedRun, unobserved
from .draws import DRAWS, Profiles, drawn_profile, draws, followed, uncertain
from .effects import table
from .engagement import Fingerprints
from .likeness import TokenSteps
from .trials import Question, Sample, Side, TrialRequest, resolved_for

Peek = Callable[[torch.Tensor], torch.Tensor]

FIGURES: Final = (
    *("output_throughput", "ttft_ms", "tpot_ms", "step_ms", "bubble_pct", "forward_occupancy"),
    *("forward_idle_us_per_step", "host_stall_us_per_step"),
    *("exposed_stall_us_per_step", "exposed_host_us_per_step"),
)


@dataclass(frozen=True, slots=True)
class LocalSide(Side):
    question: Question
    order: TrialRequest
    spreads = True

    def run(self, seed: int | None) -> Sample:
        try:
            return run_trial(self.question, replace(self.order, seed=seed))
        except MachineError as error:
            raise MachineError(f"{self.label}: {error}") from None

    def recorded(self, seed: int | None, folder: Path) -> tuple[Result, Path]:
        order = replace(self.order, seed=seed, record=str(folder))
        return run_trial(self.question, order).result, folder

    def margin(self, seed: int, request: str, position: int) -> float | None:
        return margin(self.question, replace(self.order, seed=seed), request, position)

    def run_each(self, known: Result, profiles: Profiles, each: MapFunction) -> Iterable[Result]:
        order = replace(self.order, seed=known.scenario.seed)
        return run_each(each, resolved_for(self.question, order), known, profiles)


def run_trial(question: Question, order: TrialRequest) -> Sample:
    """Raises what ``execute`` and ``resolved_for`` raise."""
    resolved = resolved_for(question, order)
    own = resolved.engine is None  # of an engine, whose ranks may differ in what they do, totals are compared
    prints, tokens = [Fingerprints() for _ in range(own and resolved.scenario.engine.ranks)], TokenSteps()
    record = Path(order.record) if order.record else None
    options = Options(device=order.device, save_tokens=True, command=order.command, record=record)
    result = execute(resolved, options, observe=lambda *_: nullcontext(tokens), extra_sinks=prints)
    steps = tuple(step for seen in prints for step in seen.steps)
    return Sample(result, steps, dict(tokens.steps)) if own else Sample(result)


class ScoringSampler(Sampler):
    """A sampler that keeps the margin of every token, by the request's seed and the position in prompt and output."""

    def __init__(self, peek: Peek) -> None:
        self._peek = peek
        self.margins: dict[tuple[int, int], float] = {}

    def sample(self, output: ModelOutput, info: SamplingInfo, seq_lens: torch.Tensor) -> torch.Tensor:
        ids = super().sample(output, info, seq_lens)
        margins = self.score(output, info, seq_lens, ids).margins
        seeds, positions, found = (
            self._peek(tensor).tolist() for tensor in (info.tensors.sampling_seeds, seq_lens, margins)
        )
        self.margins |= zip(zip(seeds, positions, strict=True), found, strict=True)
        return ids


@exits_are_crashes()
def margin(question: Question, order: TrialRequest, request: str, position: int) -> float | None:
    """By how far the best score led the second when output token ``position`` of ``request`` was drawn. None where
    values are not computed, or by another project's engine, or the request did not get that far."""
    resolved = resolved_for(question, order)
    if order.engine is not None or resolved.scenario.device.values == "none":
        return None
    sink = GatedSink()
    with open_machine(device_kind(order.device, resolved.scenario), resolved, sink) as machine:
        sampler = ScoringSampler(machine.peek)
        bench = PreparedRun(resolved, machine, sink, sampler)
        bench.warm_up()
        records = bench.measure(unobserved).collector.requests.totals.records
    found = next((record for record in records if record.id == request), None)
    if found is None:
        return None
    seed = row_seed(resolved.scenario.measure.seed, found.index)
    return sampler.margins.get((seed, found.prompt_tokens + position))


def run_each(each: MapFunction, question: Resolved, known: Result, profiles: Profiles) -> Iterable[Result]:
    """Run the question on each of the profiles; ``known`` is its result on its own. An engine's process, which has
    imported it, runs one after the other where that is sooner. Raises what ``execute`` raises."""
    bare = without_values(question)
    if bare is not None and _run(bare).metrics == known.metrics:
        question = bare
    if question.engine is not None and not saves_time(len(profiles), known.run.wall_s, known.run.import_s):
        each = map
    return each(_run, [replace(question, hardware=profile) for profile in profiles])


def _run(question: Resolved) -> Result:
    return whole(execute(question, Options(device="vgpu")))


def without_values(question: Resolved) -> Resolved | None:
    """The question with values none, which run faster; None if it has them, the scenario needs values, or an engine
    runs it. Its metrics are often, and not always, the same to the last digit."""
    device = question.scenario.device.model_copy(update={"values": "none"})
    scenario = question.scenario.model_copy(update={"device": device})
    needed = question.engine is not None or any(
        (*checks.findings(scenario), *combinations.findings(scenario))
    )
    if needed or device == question.scenario.device:
        return None
    return replace(question, scenario=scenario)


def unrepeatable(question: Resolved, options: Options) -> str:
    """Return why another run would not have the same times to the last digit; empty if it would."""
    measured = measured_times(question.scenario, options.device)
    reasons = (
        ("it takes one relay", len(question.relays) > 1),
        (measured, bool(measured)),
        ("an adversary's times mean nothing", options.adversary is not None),
        ("ranks in processes have clocks of their own", options.world == "distributed"),
    )
    return next((reason for reason, holds in reasons if holds), "")


def measured_times(scenario: Scenario, device: DeviceChoice) -> str:
    """Return which times of a run are measured, so that it may not share the machine; empty where none are."""
    if device == "cuda" or device_kind(device, scenario) == "cuda":
        return "times are measured on CUDA"
    return "device.host=measured measures the host's times" if scenario.device.host == "measured" else ""


def refusal(question: Resolved, options: Options) -> str:
    """Return why the figures of such a run have no ranges; empty where they have."""
    fixed = f"hardware {question.hardware.name} has no range for any constant"
    return unrepeatable(question, options) or ("" if uncertain(question.hardware) else fixed)


def ranges(question: Resolved, result: Result, count: int = DRAWS) -> RangesPart:
    """Run the question again under ``count`` draws. Figures that abstain in any run are left out."""
    drawn = draws(question.hardware, count, runs=(result,))
    profiles = [drawn_profile(question.hardware, draw) for draw in drawn]
    with pool(count) as each:
        found = table([result, *run_each(each, question, result, profiles)])
    metrics = {}
    for name in filter(found.__contains__, FIGURES):
        values = [entry.value for entry in found[name][1:]]
        constant, correlation = followed(values, drawn)
        metrics[name] = RangePart(
            low=min(values), high=max(values), follows=constant, correlation=correlation
        )
    return RangesPart(draws=count, metrics=metrics)
