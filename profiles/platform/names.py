"""The names of a command line and its overrides that do not exist. Imports no torch, which takes seconds, so that such
a name is refused at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ...scenarios.loader import examine, opened
from ...scenarios.loader import load as load_scenario
from ...scenarios.problems import KeyPath, Problem, ScenarioError, either, meant, show, touches, unknown
from ...scenarios.schema import Scenario
from ...sched.model.config import PRESETS
from ...sched.relay.names import FAULT_NAMES, SWITCH_VALUES
from .hardware import HardwareError, load

# Keys that are checked against files, or against the shape of the model.
_CHECKED_LATER: Final[tuple[KeyPath, ...]] = (
    ("model", "path"),
    ("workload", "trace"),
    ("workload", "encoder_tokens"),
    ("workload", "sampling", "grammar"),
    ("engine", "speculative", "draft"),
    ("engine", "pipeline", "stages"),
    ("engine", "data_parallel", "ranks"),
    ("engine", "hisparse"),
    ("engine", "split_prefill"),
    ("case", "metric"),
)


class FaultError(ValueError):
    """A fault that does not exist, or that waits for a feature."""


def refuse_mistyped(name: str, overrides: Sequence[str] = ()) -> None:
    """Raises ScenarioError with all that is wrong with a scenario, unless it has keys that only ``ask`` can check,
    together with all others."""
    scenario, problems = examine(*opened(name), overrides)
    found = [*problems, *(one for one in misnamed(scenario) if not touches(one, problems))]
    if found and not any(path in scenario.source.places for path in _CHECKED_LATER):
        raise ScenarioError(found)


def load_named(name: str, overrides: Sequence[str] = ()) -> Scenario:
    """The scenario, of which every name but those of files exists. Raises ScenarioError."""
    scenario = load_scenario(name, overrides)
    require_names(scenario)
    return scenario


def require_names(scenario: Scenario) -> None:
    """Raises ScenarioError."""
    if found := list(misnamed(scenario)):
        raise ScenarioError(found)


def require_faults(names: Sequence[str]) -> None:
    """Raises FaultError."""
    for name in names:
        if name not in FAULT_NAMES:
            hint = meant(name, FAULT_NAMES) or "; schedbench list faults has them all"
            raise FaultError(f"no fault {name!r}{hint}")


def misnamed(scenario: Scenario) -> Iterator[Problem]:
    """Presets, hardware profiles, switches and settings that do not exist."""
    preset, problem = scenario.model.preset, scenario.source.problem
    if preset is not None and preset not in PRESETS:
        yield problem(("model", "preset"), unknown("preset", preset, sorted(PRESETS)))
    try:
        load(scenario.device.hardware)
    except HardwareError as error:
        yield problem(("device", "hardware"), str(error))
    given = (
        ((*at, name), value)
        for at, relay in scenario.relays.items()
        for name, value in relay.switches.items()
    )
    for key, value in given:
        switch = str(key[-1])
        if switch not in SWITCH_VALUES:
            yield problem(key, unknown("relay switch", switch, list(SWITCH_VALUES)))
        elif word(value) not in SWITCH_VALUES[switch]:
            yield problem(key, f"expected {either(SWITCH_VALUES[switch])}, got {show(value)}")


def word(value: bool | int | float | str) -> str:
    """YAML reads a bare ``off`` as a boolean; switches are words."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)
