"""A side whose runs happen in this process, or in that of an engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ...sched.observe import Clock, Observer
from ..platform.pool import MapFunction
from ..ranks.execute import Options, execute
from ..record.result import Result
from .divergence import TokenSteps
from .drawn_runs import run_each
from .draws import Profiles
from .fingerprint import Fingerprints
from .margins import margin
from .trial import Question, Sample, TrialRequest, resolved_for


@dataclass(frozen=True, slots=True)
class LocalSide:
    label: str
    question: Question
    order: TrialRequest

    @property
    def seeds(self) -> None:
        return None

    @property
    def spreads(self) -> bool:
        return True

    def run(self, seed: int | None) -> Sample:
        return run_trial(self.question, replace(self.order, seed=seed))

    def recorded(self, seed: int | None, folder: Path) -> tuple[Result, Path]:
        order = replace(self.order, seed=seed, record=str(folder))
        return run_trial(self.question, order).result, folder

    def margin(self, seed: int, request: str, position: int) -> float | None:
        if self.order.engine is not None:
            return None
        return margin(self.question, replace(self.order, seed=seed), request, position)

    def all(self) -> Sequence[Sample]:
        return ()

    def run_each(self, known: Result, profiles: Profiles, each: MapFunction) -> Iterable[Result]:
        order = replace(self.order, seed=known.scenario.seed)
        return run_each(each, resolved_for(self.question, order), known, profiles)


def run_trial(question: Question, order: TrialRequest) -> Sample:
    """Raises what ``execute`` and ``resolved_for`` raise."""
    resolved = resolved_for(question, order)
    prints, tokens = Fingerprints(), TokenSteps()

    @contextmanager
    def watch(clock: Clock, total: int) -> Iterator[Observer]:  # noqa: ARG001
        yield tokens

    record = Path(order.record) if order.record else None
    options = Options(device=order.device, save_tokens=True, command=order.command, record=record)
    outcome = execute(resolved, resolved.relays[0], options, observe=watch, extra_sink=prints)
    if resolved.engine is not None:  # whose steps are in another process
        return Sample(outcome.result)
    return Sample(outcome.result, prints.steps, dict(tokens.steps))
