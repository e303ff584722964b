"""The sides of a comparison: overrides of the scenario, another version of the program, or stored results."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from ...scenarios.overrides import expand
from ...scenarios.problems import nearest
from ...sched.relay.names import ALIASES, STATE_NAMES
from ..captures.files import SUFFIXES, Reader, captures_in
from ..engines.names import adapter_of, is_engine
from ..platform.engine_choice import EngineChoice
from ..platform.pool import MapFunction, require_alone
from ..record.result import Result
from .draws import Profiles
from .likeness import LikenessError, unlike_runs
from .trials import Question, Sample, Side, TrialRequest, WorkloadError, unfinished
from .worker import SOURCES, SideError, here, refs, working, worktree

_GIT: Final = "git:"
ENGINE: Final = "engine"  # names an engine where a key of the scenario could stand


@dataclass(frozen=True, slots=True)
class SideSpec:
    """A side as it was typed: a ref, another project's engine, stored results or their files, or nothing of these; and
    overrides with full keys, unless results are stored."""

    label: str
    overrides: tuple[str, ...] = ()
    ref: str | None = None
    stored: tuple[Path | Result, ...] = ()
    reader: Reader = field(default_factory=Reader)
    engine: EngineChoice | None = None

    @property
    def varied(self) -> frozenset[str]:
        """The keys that this side sets."""
        engine = () if self.engine is None else (ENGINE,)
        return frozenset((*(override.partition("=")[0] for override in self.overrides), *engine))


@dataclass(frozen=True, slots=True)
class StoredSide(Side):
    """Results from files, by workload seed. Measured results have several of one seed."""

    samples: Mapping[int, tuple[Sample, ...]]
    folder: Path | None = None

    @property
    def seeds(self) -> Collection[int]:
        return self.samples.keys()

    def run(self, seed: int | None) -> Sample:
        """Raises SideError where no result of that seed is there."""
        seed = min(self.samples) if seed is None else seed
        if seed not in self.samples:
            raise SideError(f"{self.label}: no stored result of workload seed {seed}")
        return self.samples[seed][0]

    def recorded(self, seed: int | None, folder: Path) -> tuple[Result, Path | None]:  # noqa: ARG002
        return self.run(seed).result, self.folder

    def run_each(self, known: Result, profiles: Profiles, each: MapFunction) -> Iterable[Result]:  # noqa: ARG002
        raise SideError(f"{self.label}: stored results cannot be run again")

    def all(self) -> Sequence[Sample]:
        return [sample for seed in sorted(self.samples) for sample in self.samples[seed]]


def parse(
    text: str, reader: Reader | None = None, choose: Callable[[str], EngineChoice] = EngineChoice
) -> SideSpec:
    """``key=value,...``, ``git:REF``, ``git:REF,key=value,...``, the same with an engine's name, which ``choose``
    completes, a result or capture file, or a folder of either. Nothing means the scenario as it stands. Raises
    SideError, ScenarioError."""
    if text.startswith(_GIT):
        ref, *overrides = split(text.removeprefix(_GIT))
        return SideSpec(text, overrides=_expanded(overrides, text), ref=ref)
    if not text.strip():
        return SideSpec("as is")
    is_folder = os.path.isdir(text)
    if is_folder or os.path.isfile(text) or text.endswith((".json", *SUFFIXES)):
        stored = stored_in(Path(text)) if is_folder else (Path(text),)
        return SideSpec(text, stored=stored, reader=reader or Reader())
    name, parts = engine_in(split(text))
    return SideSpec(text, _expanded(parts, text), engine=None if name is None else choose(name))


def engine_in(parts: Sequence[str]) -> tuple[str | None, list[str]]:
    """The engine that is named first, or by ``engine=``, and the other parts."""
    named = [part for part in parts if is_engine(part.removeprefix(f"{ENGINE}=")) and part.startswith(ENGINE)]
    found = parts[0] if is_engine(parts[0]) else next(iter(named), None)
    if found is None:
        return None, list(parts)
    return found.removeprefix(f"{ENGINE}="), [part for part in parts if part != found]


def stored_in(folder: Path) -> tuple[Path, ...]:
    """The results in a folder, or else its captures. Raises SideError."""
    found = tuple(sorted(folder.glob("*.json"))) or tuple(captures_in(folder))
    if not found:
        engine = f"{adapter_of(folder)}:{folder}"
        raise SideError(
            f"{folder}: no results in this folder, and no captures; an engine in it would be {engine}"
        )
    return found


def split(text: str) -> list[str]:
    """Splits ``text`` at commas outside of brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "{[(") - (letter in "}])")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _expanded(overrides: list[str], text: str) -> tuple[str, ...]:
    found = []
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key.strip() or f"{key}:" == _GIT:
            raise SideError(
                f"{text!r} is no side: expected key=value,..., git:REF or a stored result{_likely(override)}"
            )
        found.append(f"{expand(key.strip())}={value}")
    return tuple(found)


def _likely(text: str) -> str:
    """The end of a message: the side that a branch, a tag or a relay state alone, or ``git=REF``, was meant to be."""
    sides = {name: f"relay={name}" for name in (*STATE_NAMES, *ALIASES)}
    with suppress(SideError):  # outside of a checkout
        sides |= {name: f"{_GIT}{name}" for name in refs(here())}
    found = nearest(text.removeprefix("git="), sides)
    return f"; did you mean '{sides[found]}'?" if found else ""


@contextmanager
def opened(
    question: Question | None, a: SideSpec, b: SideSpec, order: TrialRequest
) -> Iterator[tuple[Side, Side]]:
    """Both sides, ready to run. Where one is another version, both run as processes, so that they run alike; an engine
    always does.

    Raises SideError, LikenessError, WorkloadError, ResultError, CaptureError, MapError, MachineError,
    MeasuredAloneError.
    """
    with ExitStack() as stack:
        apart = a.ref is not None or b.ref is not None
        trees = [_sources(stack, spec) if apart and spec.engine is None else None for spec in (a, b)]
        yield _side(stack, question, a, order, trees[0]), _side(stack, question, b, order, trees[1])


def _sources(stack: ExitStack, spec: SideSpec) -> Path:
    """The sources of the side's version, or of the working tree."""
    root = here()
    return (root if spec.ref is None else stack.enter_context(worktree(root, spec.ref))) / SOURCES


def _side(
    stack: ExitStack, question: Question | None, spec: SideSpec, order: TrialRequest, sources: Path | None
) -> Side:
    """``sources``: of the version that runs in a process; None for this process."""
    if spec.stored:
        folders = [stored.parent for stored in spec.stored if isinstance(stored, Path)]
        return StoredSide(spec.label, _read(spec), folders[0] if folders else None)
    if question is None:
        raise SideError("a scenario is needed unless both sides are stored results")
    from .local import LocalSide, measured_times

    require_alone(measured_times(question.scenario(() if spec.ref else spec.overrides), order.device))
    order = replace(order, overrides=spec.overrides, engine=spec.engine)
    if sources is None:
        return LocalSide(spec.label, question, order)
    return stack.enter_context(working(spec.label, question, order, sources=sources))


def require_whole(result: Result, name: str) -> None:
    """Raises SideError for a result whose run was interrupted, WorkloadError for one that broke off or in which no
    request finished."""
    if result.run.cancelled:
        raise SideError(f"{name}: the result is partial, because its run was interrupted")
    if reason := unfinished(result):
        raise WorkloadError(f"{name}: {reason}")


def _read(spec: SideSpec) -> dict[int, tuple[Sample, ...]]:
    """Raises LikenessError for runs that are not of one side, and what ``require_whole`` raises."""
    samples: dict[int, tuple[Sample, ...]] = {}
    first: tuple[str, Result] | None = None
    for number, stored in enumerate(spec.stored):
        result = stored if isinstance(stored, Result) else spec.reader.read(stored)
        name = str(stored) if isinstance(stored, Path) else f"run {number} of {spec.label}"
        require_whole(result, name)
        first = first or (name, result)
        if differences := unlike_runs(first[1], result):
            raise LikenessError(differences, f"{first[0]} and {name}")
        sample = Sample(result)
        samples[sample.seed] = (*samples.get(sample.seed, ()), sample)
    return samples
