"""Runs of one question on several hardware profiles, such as the draws of one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from ...scenarios import checks, combinations
from ..platform.pool import MapFunction, saves_time
from ..platform.resolve import Resolved
from ..ranks.execute import Options, execute
from ..record.result import Result
from .draws import Profiles

_OPTIONS: Final = Options(device="vgpu")


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
