"""The checks that a real device can answer: a run's end, its invariants, and its hazards, watched for from inside."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ...sched.relay.choice import RelayChoice
from ..cuda.hazards.machine import require_one_device
from ..platform.resolve import Resolved
from ..platform.speculation import speculation
from ..ranks.execute import Options
from ..run.crash import Crash
from . import adversaries, drafts, tokens
from .examine import Notice, came_to_its_end, hazards, kept, silence
from .invariants import Invariants
from .report import Check, Report, skipped
from .runs import attempt

# Those that are asked elsewhere, and why.
ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "contract": "it is the relay's, whatever the device: check on the virtual GPU",
        tokens.NAME: "a GPU rounds as its batches fall: check on the virtual GPU",
        drafts.NAME: "a GPU rounds as its batches fall: check on the virtual GPU",
        "budget": "a pass that is watched for hazards counts nothing: run counts",
        adversaries.NAME: "a real device decides itself when work is done",
    }
)


def examine_all(resolved: Resolved, notice: Notice = silence) -> Sequence[Report]:
    """Every relay of the question. Raises MachineError."""
    require_one_device(resolved)
    return [_examine(resolved, relay, notice) for relay in resolved.relays]


def _examine(resolved: Resolved, relay: RelayChoice, notice: Notice) -> Report:
    begin = time.perf_counter()
    notice(f"{relay.state.name}: watched run")
    guard = Invariants()
    outcome = attempt(resolved, relay, Options(device="cuda", save_tokens=True, hazards=True), guard)
    found = (
        skipped("hazards", "the run broke down") if isinstance(outcome, Crash) else hazards(outcome.result)
    )
    checks = (came_to_its_end(outcome), kept(guard, outcome), found, *_asked_elsewhere(resolved))
    result = None if isinstance(outcome, Crash) else outcome.result
    return Report(relay, checks, result, time.perf_counter() - begin)


def _asked_elsewhere(resolved: Resolved) -> Sequence[Check]:
    drafting = speculation(resolved.scenario) is not None
    return [skipped(name, why) for name, why in ELSEWHERE.items() if drafting or name != drafts.NAME]
