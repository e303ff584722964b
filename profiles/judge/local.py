"""A side whose runs happen in this process, or in that of an engine, and the margin of the scores at one of its tokens.

The margin is found by one more run that scores every token. Scoring adds a kernel to each step, so that the times of
this run are meaningless. On the virtual GPU its tokens are those of the run that it repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ...sched.batch import ModelOutput
from ...sched.config import SamplingParams
from ...sched.model.sampler import Sampler
from ...sched.model.sampling_info import SamplingInfo
from ...sched.observe import Clock, Observer
from ...sched.request import Request
from ..platform.pool import MapFunction
from ..ranks.execute import Options, execute
from ..record.result import Result
from ..run.machines import device_kind, open_machine
from ..run.runner import GatedSink, PreparedRun
from .divergence import TokenSteps
from .drawn_runs import run_each
from .draws import Profiles
from .fingerprint import Fingerprints
from .trial import Question, Sample, TrialRequest, resolved_for
from .trials import Side

Peek = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LocalSide(Side):
    question: Question
    order: TrialRequest
    spreads = True

    def run(self, seed: int | None) -> Sample:
        return run_trial(self.question, replace(self.order, seed=seed))

    def recorded(self, seed: int | None, folder: Path) -> tuple[Result, Path]:
        order = replace(self.order, seed=seed, record=str(folder))
        return run_trial(self.question, order).result, folder

    def margin(self, seed: int, request: str, position: int) -> float | None:
        if self.order.engine is not None:
            return None
        return margin(self.question, replace(self.order, seed=seed), request, position)

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


class ScoringSampler(Sampler):
    """A sampler that keeps the margin of every token, by request parameters and position."""

    def __init__(self, peek: Peek) -> None:
        self._peek = peek
        self._margins: dict[int, dict[int, float]] = {}
        self._known: dict[int, SamplingParams] = {}  # a reference, so that no other object gets the same id

    def sample(self, output: ModelOutput, info: SamplingInfo, seq_lens: torch.Tensor) -> torch.Tensor:
        ids = super().sample(output, info, seq_lens)
        margins = self.score(output, info, seq_lens, ids).margins
        positions = self._peek(seq_lens).tolist()
        for params, position, margin in zip(
            info.params, positions, self._peek(margins).tolist(), strict=True
        ):
            self._known[id(params)] = params
            self._margins.setdefault(id(params), {})[position] = margin
        return ids

    def margin(self, params: SamplingParams, position: int) -> float | None:
        """The margin of the token at ``position`` of the prompt and output together."""
        return self._margins.get(id(params), {}).get(position)


class _Finder(Observer):
    """Observes one request."""

    def __init__(self, request: str) -> None:
        self.found: Request | None = None
        self._id = request

    def tokens(self, requests: Sequence[Request], count: int) -> None:  # noqa: ARG002
        self.found = next((request for request in requests if request.id == self._id), self.found)


def margin(question: Question, order: TrialRequest, request: str, position: int) -> float | None:
    """By how far the best score led the second when output token ``position`` of ``request`` was drawn. None where
    values are not computed, or the request did not get that far."""
    resolved = resolved_for(question, order)
    if resolved.scenario.device.values == "none":
        return None
    finder, sink = _Finder(request), GatedSink()

    @contextmanager
    def watch(clock: Clock, total: int) -> Iterator[Observer]:  # noqa: ARG001
        yield finder

    with open_machine(device_kind(order.device, resolved.scenario), resolved, sink) as machine:
        sampler = ScoringSampler(machine.peek)
        bench = PreparedRun(resolved, machine, resolved.relays[0], sink, sampler)
        bench.warm_up()
        bench.measure(watch)
    if finder.found is None:
        return None
    return sampler.margin(finder.found.sampling, len(finder.found.origin_input_ids) + position)
