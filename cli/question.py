"""What was typed, as a question: overrides, relay, budget and faults. Errors blame what was typed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import UsageError

if TYPE_CHECKING:
    from ..profiles.platform.resolve import Resolved
    from ..scenarios.problems import Problem


def asked(
    name: str,
    overrides: Sequence[str],
    *,
    relay: str | None = None,
    expect: Sequence[str] = (),
    faults: Sequence[str] = (),
) -> Resolved:
    """Raises ScenarioError, FaultError and RelayError."""
    from ..profiles.check.faults import broken

    return broken(_ask(name, overrides, relay, expect), faults)


def folder(path: Path | None) -> None:
    """Make the folder for results before there are any: after a long run is too late to find that it cannot be."""
    if path is None:
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output-dir {path}: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise UsageError(f"--output-dir {path}: not writable")


def _ask(name: str, overrides: Sequence[str], relay: str | None, expect: Sequence[str]) -> Resolved:
    from ..profiles.platform.resolve import ask
    from ..scenarios.problems import ScenarioError

    for budget in expect:
        if "=" not in budget:
            raise UsageError(
                f"--expect: expected KIND.STREAM.COUNTER=N, e.g. decode.steady.schedule.sync=0, got {budget!r}"
            )
    given = [*overrides, *(f"expect.{budget}" for budget in expect)]
    if relay is not None:
        given.append(f"engine.relay={relay}")
    spelt = {
        "--relay": "engine.relay" if relay is not None else None,
        "--expect": "expect" if expect else None,
    }
    try:
        return ask(name, given)
    except ScenarioError as error:
        raise ScenarioError([_as_typed(problem, spelt) for problem in error.problems]) from None


def _as_typed(problem: Problem, spelt: dict[str, str | None]) -> Problem:
    """Blame the option that was typed, not the key that it stands for."""
    for option, key in spelt.items():
        if key is not None and problem.place.file == "--set" and problem.path.startswith(key):
            return problem._replace(place=problem.place._replace(file=option))
    return problem
