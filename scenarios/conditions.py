"""Conditions of a budget: ``when: {overlap: true, relay: latest}`` in a kind of step under ``expect``.

Keys are scenario keys, shortened as for ``--set`` where they are unambiguous. ``relay`` and ``speculative`` stand for
the name of the state and of the algorithm.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from ..sched.relay.names import ALIASES
from .combinations import Finding
from .diagnosis import diagnose
from .overrides import BARE, expand, keys
from .problems import KeyPath, ScenarioError, ScenarioSource, SourceLocation, unknown
from .schema import Scenario

RELAY_STATE = ("engine", "relay", "state")
_OVERLAP = ("engine", "overlap")


def condition_path(key: str) -> tuple[str, ...]:
    """The path of the value that a condition's key stands for. Raises ScenarioError."""
    path = tuple(expand(key).split("."))
    return (*path, BARE[path[-1]]) if path[-1] in BARE else path


def findings(scenario: Scenario) -> Iterator[Finding]:
    """Conditions whose key does not exist, or whose value its key cannot have."""
    for kind, expectation in scenario.expect.items():
        for key, value in (expectation.when or {}).items():
            at = ("expect", kind, "when", key)
            try:
                yield from ((at, reason) for reason in _impossible(scenario, condition_path(key), value))
            except ScenarioError as error:
                yield at, error.problems[0].message


def _impossible(scenario: Scenario, path: tuple[str, ...], value: object) -> Iterator[str]:
    if path not in keys():
        yield unknown("key", ".".join(path), sorted(".".join(known) for known in keys()))
        return
    document = scenario.expanded()
    section = _value(document, path[:-1])
    if section is None:
        return  # a section that this scenario does not have
    if not isinstance(section, dict) or isinstance(section.get(path[-1]), dict | list):
        yield "expected a key with a single value"
        return
    section[path[-1]] = value
    try:
        Scenario.model_validate(document)
    except ValidationError as error:
        places: dict[KeyPath, SourceLocation] = {
            path[:depth]: SourceLocation("when") for depth in range(len(path) + 1)
        }
        problem = diagnose(error, root=Scenario, source=ScenarioSource(places)).get(path)
        if problem is not None:
            yield problem.message


def unmet(when: Mapping[str, Any], expanded: Mapping[str, Any], *, relay: str, overlap: bool) -> str:
    """The first condition that a run does not meet, and what it has instead; empty where it meets all. ``relay`` is the
    state that ran, ``overlap`` whether its loop overlapped, which decides where the scenario says ``auto``.

    Raises ScenarioError where a key is unknown.
    """
    for key, wanted in when.items():
        path = condition_path(key)
        found = relay if path == RELAY_STATE else _value(expanded, path)
        if found is None:
            found = "none"
        if path == RELAY_STATE:
            wanted = ALIASES.get(wanted, wanted)
        if path == _OVERLAP and found == "auto" != wanted:
            found = overlap
        if found != wanted or isinstance(found, bool) != isinstance(wanted, bool):
            return f"asked where {key} is {_shown(wanted)}, and here it is {_shown(found)}"
    return ""


def _value(expanded: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = expanded
    for part in path:
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
