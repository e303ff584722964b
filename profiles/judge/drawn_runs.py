"""Runs of one question on several hardware profiles, such as the draws of one, and the ranges of its figures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from ...scenarios import checks, combinations
from ...scenarios.schema import Scenario
from ..platform.pool import MapFunction, pool, saves_time
from ..platform.resolve import Resolved
from ..ranks.execute import Options, execute
from ..record.result import RangePart, RangesPart, Result
from ..run.machines import DeviceChoice, device_kind
from .draws import DRAWS, Profiles, drawn_profile, draws, followed, uncertain
from .metric_values import table

_OPTIONS: Final = Options(device="vgpu")
FIGURES: Final = (
    *("output_throughput", "ttft_ms", "tpot_ms", "step_ms", "bubble_pct", "forward_occupancy"),
    *("forward_idle_us_per_step", "host_stall_us_per_step"),
    *("exposed_stall_us_per_step", "exposed_host_us_per_step"),
)


def run_each(each: MapFunction, question: Resolved, known: Result, profiles: Profiles) -> Iterable[Result]:
    """Run the question on each of the profiles; ``known`` is its result on its own. An engine's process, which has
    imported it, runs one after the other where that is sooner. Raises what ``execute`` raises."""
    if question.engine is None:
        bare = without_values(question)
        if bare is not None and _run(bare).metrics == known.metrics:
            question = bare
    elif not saves_time(len(profiles), known.run.wall_s, known.run.import_s):
        return list(map(_run, [replace(question, hardware=profile) for profile in profiles]))
    return each(_run, [replace(question, hardware=profile) for profile in profiles])


def _run(question: Resolved) -> Result:
    return execute(question, question.relays[0], _OPTIONS).result


def without_values(question: Resolved) -> Resolved | None:
    """The question with values none, which run faster; None if it has them, or the scenario needs values. Its metrics
    are often, and not always, the same to the last digit."""
    device = question.scenario.device.model_copy(update={"values": "none"})
    scenario = question.scenario.model_copy(update={"device": device})
    if device == question.scenario.device or any(
        (*checks.findings(scenario), *combinations.findings(scenario))
    ):
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
    if device_kind(device, scenario) == "cuda":
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
    values = {name: [entry.value for entry in found[name][1:]] for name in FIGURES if name in found}
    parts = {name: (min(x), max(x), *followed(x, drawn)) for name, x in values.items()}
    return RangesPart(
        draws=count,
        metrics={
            name: RangePart(low=low, high=high, follows=constant, correlation=correlation)
            for name, (low, high, constant, correlation) in parts.items()
        },
    )
