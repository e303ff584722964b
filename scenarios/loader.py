"""Loads a scenario from a path or a shipped name. Reports all problems at once."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterable, Iterator, Sequence, Set
from functools import cache
from pathlib import Path

from pydantic import ValidationError

from . import checks, combinations, shipped
from .diagnosis import diagnose
from .document import MAX_BYTES, Document, Value, read
from .overrides import expand, override, split
from .problems import (
    OPTION,
    KeyPath,
    Problem,
    ScenarioError,
    ScenarioSource,
    SourceLocation,
    dotted,
    meant,
    show,
    touches,
    unknown,
)
from .schema import Scenario

_PLACEHOLDER = re.compile(r"<([A-Z_]+)>")


def load(path_or_name: str, overrides: Sequence[str] = ()) -> Scenario:
    """The scenario in a file, or a shipped one, with ``KEY=VALUE`` overrides applied in order.

    Raises ScenarioError with all problems at once.
    """
    content, file, folder = opened(path_or_name)
    return loads(content, file=file, folder=folder, overrides=overrides)


def loads(
    content: bytes, *, file: str = "scenario", folder: Path = Path(), overrides: Sequence[str] = ()
) -> Scenario:
    """``load`` for the content of a scenario; ``file`` is its name in problems."""
    scenario, problems = examine(content, file, folder, overrides)
    if problems:
        raise ScenarioError(problems)
    return scenario


def examine(
    content: bytes, file: str, folder: Path, overrides: Sequence[str]
) -> tuple[Scenario, Sequence[Problem]]:
    """The scenario without its broken keys, in which the caller can look for further problems, and the problems so far.

    Raises ScenarioError where the other keys make no scenario.
    """
    scenario, problems = _loaded(content, file, folder, overrides)
    if scenario is None:
        raise ScenarioError(problems)
    return scenario, [*_blamed(problems, content, file, folder, overrides)] if problems else ()


def _loaded(
    content: bytes, file: str, folder: Path, overrides: Sequence[str]
) -> tuple[Scenario | None, list[Problem]]:
    document = read(content, file)
    overridden = frozenset(_apply(document, overrides))
    source = ScenarioSource(document.places, folder, overridden)
    if not isinstance(document.data, dict) or "schema_version" in document.data:
        found = "a stored result" if isinstance(document.data, dict) else show(document.data)
        message = f"expected a mapping of name, model, workload and so on, got {found}"
        return None, [*document.problems, source.problem((), message)]
    return _validated(document, source)


def _blamed(
    problems: Iterable[Problem], content: bytes, file: str, folder: Path, overrides: Sequence[str]
) -> Iterator[Problem]:
    """The problems, where a line of the file is valid without some override as problems of the last such override."""
    fewer = (_loaded(content, file, folder, overrides[:count])[1] for count in range(len(overrides)))
    before = [{problem.path for problem in found} for found in fewer]
    for problem in problems:
        causes = [text for text, paths in zip(overrides, before, strict=True) if problem.path not in paths]
        if problem.place == OPTION or not causes:
            yield problem
            continue
        key, _, value = causes[-1].partition("=")
        yield Problem(OPTION, expand(key.strip()), f"{dotted((value,))} contradicts {problem}")


def _validated(document: Document, source: ScenarioSource) -> tuple[Scenario | None, list[Problem]]:
    scenario, faults = _scenario(document.data, source)
    problems = [*document.problems, *_placeholders(document.data, (), source=source)]
    reported = {problem.path for problem in problems}
    problems += [problem for problem in faults.values() if problem.path not in reported]
    if faults:
        broken = (*faults, *(split(problem.path) for problem in document.problems))
        scenario = _salvaged(document.data, source, faulty=broken)
    if scenario is None:
        return None, problems
    found = [
        *checks.findings(scenario, broken=faults),
        *combinations.findings(scenario, broken=faults, overridden=source.overridden),
    ]
    checked = [source.problem(path, text) for path, text in found]
    problems += [problem for problem in checked if not touches(problem, problems)]
    scenario._source = source
    return scenario, problems


def _salvaged(data: Value, source: ScenarioSource, *, faulty: Iterable[KeyPath]) -> Scenario | None:
    """The scenario without its broken keys, so that the other keys can be checked at the same time."""
    for _ in range(4):  # a section may become invalid without the key
        data = _without(data, {_removable(path, data) for path in faulty})
        scenario, faulty = _scenario(data, source)
        if scenario:
            return scenario
    return None


def _scenario(data: Value, source: ScenarioSource) -> tuple[Scenario | None, dict[KeyPath, Problem]]:
    try:
        found = Scenario.model_validate(data)
    except ValidationError as error:
        return None, diagnose(error, root=Scenario, source=source)
    absent = {}
    for at, relay in found.relays.items():
        file = source.locate((*at, "state"), relay.own[0]) if relay.own else None
        if file is not None and not file.is_file():
            key = (*at, "state") if (*at, "state") in source.places else at
            absent[key] = source.problem(key, f"{file}: no such file with a relay state")
    return found, absent


def _apply(document: Document, overrides: Sequence[str]) -> Iterator[KeyPath]:
    for text in overrides:
        try:
            yield override(document, text)
        except ScenarioError as error:
            document.problems += error.problems


def _placeholders(value: Value, path: KeyPath, *, source: ScenarioSource) -> Iterator[Problem]:
    """Values such as ``<FILE>``, which have to be given with --set."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _placeholders(inner, (*path, key), source=source)
    elif isinstance(value, str) and (name := _PLACEHOLDER.fullmatch(value)):
        yield source.problem(path, f"has to be given: --set {dotted(path)}={name[1]}")


def _removable(path: KeyPath, data: Value) -> KeyPath:
    """The path to leave out when ``path`` is invalid: itself, the list around it, or the section that lacks it."""
    for depth, part in enumerate(path):
        if not isinstance(data, dict) or part not in data:
            return path[:depth]
        data = data[str(part)]
    return path


def _without(data: Value, paths: Set[KeyPath]) -> Value:
    """A copy of ``data`` in which none of ``paths`` is given."""
    if not isinstance(data, dict):
        return data
    kept = {key: value for key, value in data.items() if (key,) not in paths}
    return {
        key: _without(value, {path[1:] for path in paths if path[:1] == (key,)})
        for key, value in kept.items()
    }


def opened(path_or_name: str) -> tuple[bytes, str, Path]:
    """The arguments of ``examine``: the content, the name of the file in problems, and the folder of relative paths.

    Raises ScenarioError.
    """
    if path_or_name in (*shipped.names(), *shipped.case_names(), *shipped.fault_names()):
        return shipped.content(path_or_name), f"{path_or_name}.yaml", Path()
    path = Path(path_or_name)
    try:
        state = path.stat()
        if stat.S_ISREG(state.st_mode):
            return _content(path), path_or_name, path.parent
        return _piped(path, state.st_dev, state.st_ino), path_or_name, Path()
    except (OSError, ValueError) as error:
        name = path_or_name if path_or_name.isprintable() and path_or_name else show(path_or_name)
        raise ScenarioError([Problem(SourceLocation(name), "", _unreadable(path, error))]) from None


def _content(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)


@cache
def _piped(path: Path, device: int, inode: int) -> bytes:  # noqa: ARG001
    """The content of a pipe, which can be read only once."""
    return _content(path)


def _unreadable(path: Path, error: Exception) -> str:
    if not isinstance(error, FileNotFoundError):
        return f"cannot be read: {getattr(error, 'strerror', None) or error}"
    shelved = (*shipped.case_names(), *shipped.fault_names())
    if path.parent in {Path(name).parent for name in shelved}:
        return f"no such file{meant(f'{path.parent}/{path.stem}', shelved)}"
    twin = path.with_suffix({".yml": ".yaml", ".yaml": ".yml"}.get(path.suffix, path.suffix))
    if twin.is_file():
        return f"no such file, did you mean '{twin}'?"
    if path.suffix or path.parent != Path():
        return f"no such file{meant(path.stem, shipped.names())}"
    return f"no such file, {unknown('scenario', path.name, shipped.names())}"
