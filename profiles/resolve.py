"""What a scenario names outside itself: model, hardware, relays, grammar. Found, or refused all at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from ..scenarios.problems import KeyPath, Problem, ScenarioError, unknown
from ..scenarios.schema import Relay, Scenario
from ..scenarios.workload import params
from ..sched.model import checkpoint
from ..sched.model.config import ModelConfig
from ..sched.model.grammar import GrammarCache, GrammarError
from ..sched.model.presets import PRESETS
from ..sched.relay.states import RelayChoice, RelayError, choose
from .hardware import HardwareError, HardwareProfile, load

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Resolved:
    scenario: Scenario
    model: ModelConfig
    hardware: HardwareProfile
    relays: tuple[RelayChoice, ...]

    @property
    def checkpoint(self) -> Path | None:
        """The directory that the weights come from; None for a preset."""
        path = self.scenario.model.path
        return None if path is None else self.scenario.source.locate(("model", "path"), path)


def resolve(scenario: Scenario) -> Resolved:
    """Raises ScenarioError with every name that leads nowhere."""
    problems: list[Problem] = []
    model = _attempt(problems, scenario, ("model",), lambda: _model(scenario))
    hardware = _attempt(problems, scenario, ("device", "hardware"), lambda: load(scenario.device.hardware))
    relays = [
        _attempt(problems, scenario, ("engine", "relay"), partial(_relay, relay))
        for relay in scenario.relays
    ]
    if model is not None:
        _attempt(problems, scenario, ("workload", "sampling", "grammar"), lambda: _grammar(scenario, model))
    if problems:
        raise ScenarioError(problems)
    assert model is not None and hardware is not None
    return Resolved(scenario, model, hardware, tuple(relay for relay in relays if relay is not None))


def _attempt(problems: list[Problem], scenario: Scenario, path: KeyPath, find: Callable[[], T]) -> T | None:
    try:
        return find()
    except (HardwareError, RelayError, GrammarError, checkpoint.CheckpointError, LookupError) as error:
        problems.append(scenario.source.problem(path, str(error.args[0])))
    return None


def _model(scenario: Scenario) -> ModelConfig:
    wanted = scenario.model
    if wanted.preset is None:
        assert wanted.path is not None
        found = checkpoint.read_config(scenario.source.locate(("model", "path"), wanted.path))
    elif wanted.preset in PRESETS:
        found = PRESETS[wanted.preset]
    else:
        raise LookupError(unknown("preset", wanted.preset, sorted(PRESETS)))
    return found if wanted.dtype == "auto" else replace(found, dtype=getattr(torch, wanted.dtype))


def _relay(relay: Relay) -> RelayChoice:
    return choose(relay.state, {name: _word(value) for name, value in relay.switches.items()})


def _word(value: bool | int | float | str) -> str:
    """YAML reads a bare ``off`` as a boolean; switches are words."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def _grammar(scenario: Scenario, model: ModelConfig) -> None:
    sampling = scenario.workload.sampling
    spec = params(sampling, max_new_tokens=1).grammar
    if spec is not None:
        GrammarCache(model.vocab_size, model.eos_token_ids).start(spec)
