"""The question that both sides of a comparison run, and their runs: equal workload seeds where times are exact,
interleaved blocks where they are measured, and all results where they are stored.

Imports no torch until a question is resolved.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple, TypeVar

from ...scenarios.loader import loads, opened
from ...scenarios.schema import Scenario
from ..platform import hardware
from ..platform.engine_choice import EngineChoice
from ..platform.pool import MapFunction, pool, prepare_pool, spread
from ..record.result import Abstained, Result
from .draws import HARDWARE, LEFT_OUT, Draw, Profiles, drawn_profile, draws
from .engagement import StepPrint
from .likeness import (
    Divergence,
    LikenessError,
    ScenarioDifference,
    comparable,
    first_divergence,
    same_tokens,
    unlike,
)
from .statistics import Side as Name
from .statistics import abba
from .verdict import DEFAULT_PAIRS, MIN_SEEDS

if TYPE_CHECKING:
    from ..platform.resolve import Resolved
    from ..run.machines import DeviceChoice

Design = Literal["seeds", "blocks", "stored"]
Tokens = Literal["equal", "different", "not applicable"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Question:
    """The text of a scenario, so that every checkout runs the same, and the overrides of both sides."""

    content: str
    file: str
    folder: str
    overrides: tuple[str, ...] = ()

    @classmethod
    def of(cls, path_or_name: str, overrides: Sequence[str] = ()) -> Question:
        """Raises ScenarioError."""
        content, file, folder = opened(path_or_name)
        text = content.decode("utf-8", "surrogateescape")
        return cls(text, file, str(folder.resolve()), tuple(overrides))

    def scenario(self, overrides: Sequence[str] = ()) -> Scenario:
        """Raises ScenarioError."""
        return loads(
            self.content.encode("utf-8", "surrogateescape"),
            file=self.file,
            folder=Path(self.folder),
            overrides=(*self.overrides, *overrides),
        )


@dataclass(frozen=True, slots=True)
class TrialRequest:
    """One run of the question with a side's overrides on a device."""

    overrides: tuple[str, ...] = ()
    seed: int | None = None  # the scenario's own
    device: DeviceChoice = "auto"
    command: str = ""
    engine: EngineChoice | None = None
    record: str = ""  # a folder that gets the timelines


class Sample(NamedTuple):
    """A result, what each step of every rank did, and the step that made each token; the latter two where they are
    known."""

    result: Result
    steps: tuple[StepPrint, ...] | None = None
    token_steps: Mapping[str, Sequence[int]] | None = None

    @property
    def seed(self) -> int:
        """The seed of the workload."""
        return self.result.scenario.seed or 0

    @property
    def exact(self) -> bool:
        """Whether the times of the run repeat exactly."""
        return self.result.labels.exact

    def document(self) -> dict[str, Any]:
        """What JSON can hold."""
        tokens = self.token_steps and {request: list(steps) for request, steps in self.token_steps.items()}
        return {"result": self.result.document(), "steps": self.steps, "token_steps": tokens}

    @classmethod
    def of(cls, document: Mapping[str, Any], *, name: str) -> Sample:
        """Raises ResultError when the result is of a version that is not understood."""
        steps = document.get("steps")
        return cls(
            Result.from_document(document["result"], name=name),
            None if steps is None else tuple(StepPrint(*step) for step in steps),
            document.get("token_steps"),
        )


def resolved_for(question: Question, order: TrialRequest) -> Resolved:
    """Raises ScenarioError, also where the scenario names several relays."""
    from ..platform.resolve import resolve

    seed = () if order.seed is None else (f"measure.seed={order.seed}",)
    scenario = question.scenario((*order.overrides, *seed))
    resolved = resolve(scenario)
    if len(resolved.relays) != 1:
        raise scenario.source.refuse(("engine", "relays"), "a side has one relay: give it as relay=NAME")
    return replace(resolved, engine=order.engine)


# Called with the side and the sample of every run as it ends.
Notice = Callable[[Name, Sample], None]


class WorkloadError(RuntimeError):
    """No request of a run finished."""


@dataclass(frozen=True, slots=True)
class Side(ABC):
    """Runs of one side. ``spreads``: whether ``run`` may be called in another process."""

    label: str
    spreads: ClassVar[bool] = False

    @property
    def seeds(self) -> Collection[int] | None:
        """The seeds that it has; None where it can run any."""
        return None

    @abstractmethod
    def run(self, seed: int | None) -> Sample:
        """Seed None is the scenario's own."""

    def all(self) -> Sequence[Sample]:
        """The stored samples; empty for a side that runs."""
        return ()

    @abstractmethod
    def recorded(self, seed: int | None, folder: Path) -> tuple[Result, Path | None]:
        """A run, and the folder that has its timelines if there are any: ``folder``, or that of the stored result."""

    @abstractmethod
    def run_each(self, known: Result, profiles: Profiles, each: MapFunction) -> Iterable[Result]:
        """Run what ``known`` is the result of once on each of the profiles; ``each`` may spread the runs."""

    def margin(self, seed: int, request: str, position: int) -> float | None:  # noqa: ARG002
        """The lead of the best score over the second where that token was drawn; None where it is unknown."""
        return None


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """The number of runs; of ``pairs``, an even one. ``varied`` are the keys that the sides set."""

    seeds: int = MIN_SEEDS
    pairs: int = DEFAULT_PAIRS
    first_seed: int = 0
    varied: frozenset[str] = frozenset()
    allow_divergence: bool = False
    draws: int = 0  # of the hardware's constants


@dataclass(frozen=True, slots=True)
class Trials:
    """``a`` and ``b`` are in the order of their running; of seeds and blocks, equal places are pairs. Tokens are
    compared pair by pair; stored runs of other seeds have no counterpart."""

    design: Design
    a: tuple[Sample, ...]
    b: tuple[Sample, ...]
    tokens: Tokens = "not applicable"
    divergence: Divergence | None = None
    one_run: bool = False  # a second seed gave the same run, which was left out

    @property
    def results(self) -> tuple[tuple[Result, ...], tuple[Result, ...]]:
        return tuple(x.result for x in self.a), tuple(x.result for x in self.b)

    def blocks(self, values_a: Sequence[T], values_b: Sequence[T]) -> list[T]:
        """In the order in which the blocks ran."""
        left, right = iter(values_a), iter(values_b)
        return [next(left if side == "a" else right) for side in abba(len(values_a))]


def conduct(a: Side, b: Side, plan: TrialPlan, notice: Notice) -> Trials:
    """Run A and B as often as their kind of times requires, and compare their tokens.

    Raises LikenessError before anything is run twice, WorkloadError, KeyboardInterrupt once the interrupted run is
    noticed, and what the sides raise.
    """
    trials = compared(_trials(a, b, plan, notice))
    where = trials.divergence
    if where is None or where.request is None or where.position is None:
        return trials
    margin_a, margin_b = (side.margin(where.seed, where.request, where.position) for side in (a, b))
    return replace(trials, divergence=where._replace(margin_a=margin_a, margin_b=margin_b))


class DrawnRuns(NamedTuple):
    """Results of both sides under the same draws of the hardware's constants. Without them, ``abstained`` is the
    reason. ``cancelled``: the user interrupted them; ``failed``: a run ended in an error."""

    draws: Sequence[Draw] = ()
    a: tuple[Result, ...] = ()
    b: tuple[Result, ...] = ()
    abstained: str = ""
    cancelled: bool = False
    failed: bool = False


NOT_DRAWN: Final = DrawnRuns(abstained=LEFT_OUT)


def conduct_draws(
    a: Side, b: Side, trials: Trials, plan: TrialPlan, report: Callable[[str], None] = lambda _: None
) -> DrawnRuns:
    """Run the first seed of both sides again under the draws. Where the user interrupts them or a run fails, in
    whatever way, all runs under draws are dropped: the draws of a Latin hypercube mean what they say only together."""
    first = trials.a[0].result
    stored = a.seeds is not None or b.seeds is not None
    why = "stored results cannot be run again" if stored else _no_draws(trials, plan)
    if why:
        return DrawnRuns(abstained=why)
    device: Any = first.scenario.expanded["device"]
    profile = hardware.load(device["hardware"])
    drawn = draws(profile, plan.draws, runs=(first, trials.b[0].result))
    profiles = [drawn_profile(profile, draw) for draw in drawn]
    found: list[Result] = []
    count = 2 * len(drawn)
    try:
        with pool(count) as each:
            runs_a = a.run_each(first, profiles, each)
            runs_b = b.run_each(trials.b[0].result, profiles, each)
            for result in chain(runs_a, runs_b):
                found.append(result)
                report(f"{len(found)} of {count} runs under draws of the hardware's constants")
    except KeyboardInterrupt:
        why = f"interrupted after {len(found)} of {count} runs under draws"
        return DrawnRuns(abstained=why, cancelled=True)
    except Exception as error:
        side = a if len(found) < len(drawn) else b
        why = f"run {len(found) + 1} of {count} under draws, of {side.label}, failed: {in_short(error)}"
        return DrawnRuns(abstained=why, failed=True)
    return DrawnRuns(drawn, tuple(found[: len(drawn)]), tuple(found[len(drawn) :]))


def in_short(error: Exception) -> str:
    """The first line of its message."""
    return str(error).partition("\n")[0] or type(error).__name__


def _no_draws(trials: Trials, plan: TrialPlan) -> str:
    if not plan.draws:
        return NOT_DRAWN.abstained
    if not trials.a[0].exact:
        return "times were measured"
    if HARDWARE in plan.varied:
        return f"the sides set {HARDWARE}"
    if trials.tokens == "different" and not plan.allow_divergence:
        return "the tokens differ"
    if all(_do_the_same(a, b) for a, b in zip(trials.a, trials.b, strict=True)):
        return "the sides do the same"
    return ""


def _do_the_same(a: Sample, b: Sample) -> bool:
    """By the steps, where they are known, and by all that was counted and timed."""
    steps_differ = a.steps is not None and b.steps is not None and a.steps != b.steps
    return not steps_differ and (a.result.metrics, a.result.per_step) == (b.result.metrics, b.result.per_step)


def compared(trials: Trials) -> Trials:
    """The trials with the verdict on tokens and the first divergence."""
    pairs = [(a, b) for a, b in zip(trials.a, trials.b, strict=False) if a.seed == b.seed]
    if not pairs or not all(comparable(a.result, b.result) for a, b in pairs):
        return trials
    for a, b in pairs:
        found = first_divergence(
            a.result, b.result, seed=a.seed, steps_a=a.token_steps, steps_b=b.token_steps
        )
        if found is not None:
            return replace(trials, tokens="different", divergence=found)
    return replace(trials, tokens="equal")


def _trials(a: Side, b: Side, plan: TrialPlan, notice: Notice) -> Trials:
    seeds = _seeds(a, b, plan)
    first_a = _run(a, "a", seeds[0], notice)
    first_b = _run(b, "b", seeds[0], notice)
    differences = unlike(first_a.result, first_b.result, varied=plan.varied)
    if differences:
        raise LikenessError(differences)
    if first_a.exact or _diverged(first_a, first_b, plan):
        return _over_seeds(a, b, seeds, plan, notice, first=(first_a, first_b))
    if a.seeds is not None or b.seeds is not None:
        return Trials("stored", *_of_equal_seeds(a.all() or [first_a], b.all() or [first_b]))
    return _in_blocks(a, b, plan, notice, seed=seeds[0])


def _of_equal_seeds(
    a: Sequence[Sample], b: Sequence[Sample]
) -> tuple[tuple[Sample, ...], tuple[Sample, ...]]:
    """The runs of both sides, of several workload seeds as many of each on either side: another seed is another
    question."""
    shared = Counter(run.seed for run in a) & Counter(run.seed for run in b)
    if len({run.seed for run in (*a, *b)}) > 1:
        a, b = (
            [run for seed, most in shared.items() for run in [x for x in side if x.seed == seed][:most]]
            for side in (a, b)
        )
    return tuple(a), tuple(b)


def _seeds(a: Side, b: Side, plan: TrialPlan) -> list[int]:
    known = [set(side.seeds) for side in (a, b) if side.seeds is not None]
    if not known:
        return list(range(plan.first_seed, plan.first_seed + plan.seeds))
    common = sorted(set.intersection(*known))
    if not common:
        raise LikenessError([ScenarioDifference("measure.seed", *(sorted(seeds) for seeds in known))])
    return common


def _over_seeds(
    a: Side, b: Side, seeds: Sequence[int], plan: TrialPlan, notice: Notice, *, first: tuple[Sample, Sample]
) -> Trials:
    """Stops after the first seed whose tokens differ, since there can be no verdict then, and where the second seed
    gives the same run: the workload has no randomness."""
    pairs = [first]
    if seeds[1:] and not _diverged(*first, plan):
        if plan.draws:
            prepare_pool()
        pairs.append((_run(a, "a", seeds[1], notice), _run(b, "b", seeds[1], notice)))
        if [*map(_without_names, pairs[0])] == [*map(_without_names, pairs[1])]:
            return Trials("seeds", (first[0],), (first[1],), one_run=True)
        if not _diverged(*pairs[-1], plan):
            pairs.extend(_later_pairs(a, b, seeds[2:], plan, notice, first[0].result))
    return Trials("seeds", tuple(x for x, _ in pairs), tuple(y for _, y in pairs))


def _later_pairs(
    a: Side, b: Side, seeds: Sequence[int], plan: TrialPlan, notice: Notice, known: Result
) -> Iterator[tuple[Sample, Sample]]:
    """Both sides of these seeds up to the first whose tokens differ. They run side by side where that saves time,
    judged by a ``known`` run."""
    tasks = [(side, seed) for seed in seeds for side in (a, b)]
    spreads = tasks and known.labels.exact and a.spreads and b.spreads
    with spread(len(tasks), known.run.wall_s, known.run.import_s) if spreads else nullcontext(map) as each:
        samples = iter(each(_sample, tasks))
        for _ in seeds:
            pair = _finished(a, "a", next(samples), notice), _finished(b, "b", next(samples), notice)
            yield pair
            if _diverged(*pair, plan):
                return


def _sample(task: tuple[Side, int]) -> Sample:
    side, seed = task
    return side.run(seed)


def _in_blocks(a: Side, b: Side, plan: TrialPlan, notice: Notice, *, seed: int) -> Trials:
    """Four blocks for each workload seed. The first run of each side, which showed that they are comparable, is its
    warm-up and not a block."""
    samples: dict[Name, list[Sample]] = {"a": [], "b": []}
    for place, name in enumerate(abba(plan.pairs)):
        samples[name].append(_run(a if name == "a" else b, name, seed + place // 4, notice))
    return Trials("blocks", tuple(samples["a"]), tuple(samples["b"]))


def _run(side: Side, name: Name, seed: int, notice: Notice) -> Sample:
    return _finished(side, name, side.run(seed), notice)


def _finished(side: Side, name: Name, sample: Sample, notice: Notice) -> Sample:
    notice(name, sample)
    if sample.result.run.cancelled:
        raise KeyboardInterrupt
    if reason := unfinished(sample.result):
        raise WorkloadError(f"{side.label}: {reason}")
    return sample


def unfinished(result: Result) -> str:
    """Why there is nothing to compare, where the run broke off or no request finished; empty elsewhere."""
    if result.run.failure:
        return f"broke off: {result.run.failure}"
    if not result.requests or any(row.status in ("finished", "aborted") for row in result.requests):
        return ""
    return f"no request finished; the reason of the first: {result.requests[0].reason}"


def shortfalls(sides: Sequence[tuple[str, Sequence[Result]]]) -> str:
    """How many requests were not served as the scenario has them, and what of its script did not happen, by the sides'
    labels where the sides differ; empty where all went as the scenario has it."""
    said = [", ".join(_shortfalls(results)) for _, results in sides]
    if len(set(said)) == 1:
        return said[0] and f"{said[0]}{' on each side' * (len(sides) > 1)}"
    return "; ".join(f"{label}: {text}" for (label, _), text in zip(sides, said, strict=True) if text)


def _shortfalls(results: Sequence[Result]) -> Iterator[str]:
    ended = Counter(row.status for result in results for row in result.requests)
    for status in ("refused", "failed"):
        if ended[status]:
            yield f"{ended[status]:,} of {ended.total():,} requests {status}"
    workloads = [one.workload for one in results if not isinstance(one.workload, Abstained)]
    if clipped := sum(workload.clipped for workload in workloads):
        count = sum(workload.requests for workload in workloads)
        yield f"{clipped:,} of {count:,} requests clipped to the context"
    yield from dict.fromkeys(f"did not happen: {entry}" for one in results for entry in one.run.missed)


def _without_names(sample: Sample) -> Result:
    """The result without what names the run, and without tokens."""
    kept = {"token_ids": None, "kept_logprobs": ()}
    requests = tuple(row.model_copy(update=kept) for row in sample.result.requests)
    names = {"run": None, "scenario": None, "outputs": None, "requests": requests}
    return sample.result.model_copy(update=names)


def _diverged(a: Sample, b: Sample, plan: TrialPlan) -> bool:
    known = comparable(a.result, b.result)
    return known and not same_tokens(a.result, b.result) and not plan.allow_divergence
