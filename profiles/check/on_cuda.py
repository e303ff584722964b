"""The checks that run on a CUDA device: the run's end, its invariants, and its hazards."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ...sched.relay.choice import RelayChoice
from ..cuda.machine import require_one_device
from ..platform.resolve import Resolved, speculation
from ..ranks.execute import Options
from ..run.crash import Crash
from . import adversaries, drafts, tokens
from .examine import Notice, hazards, invariants, run_ended, silence
from .invariants import Invariants
from .report import Check, Report, skipped
from .runs import attempt

# The checks that run on the virtual GPU only, and why.
VGPU_ONLY: Mapping[str, str] = MappingProxyType(
    {
        "contract": "it does not depend on the device: check on the virtual GPU",
        tokens.NAME: "a GPU's rounding depends on its batches: check on the virtual GPU",
        drafts.NAME: "a GPU's rounding depends on its batches: check on the virtual GPU",
        "budget": "a pass that is checked for hazards has no counts: use run",
        adversaries.NAME: "the order of work on a real device cannot be chosen",
    }
)


def examine_all(resolved: Resolved, notice: Notice = silence) -> Sequence[Report]:
    """Check every relay of the question. Raises MachineError."""
    require_one_device(resolved)
    return [_examine(resolved, relay, notice) for relay in resolved.relays]


def _examine(resolved: Resolved, relay: RelayChoice, notice: Notice) -> Report:
    begin = time.perf_counter()
    notice(f"{relay.state.name}: watched run")
    guard = Invariants()
    outcome = attempt(resolved, relay, Options(device="cuda", save_tokens=True, hazards=True), guard)
    found = skipped("hazards", "the run crashed") if isinstance(outcome, Crash) else hazards(outcome.result)
    checks = (run_ended(outcome), invariants(guard, outcome), found, *_vgpu_only(resolved))
    result = None if isinstance(outcome, Crash) else outcome.result
    return Report(relay, checks, result, time.perf_counter() - begin)


def _vgpu_only(resolved: Resolved) -> Sequence[Check]:
    drafting = speculation(resolved.scenario) is not None
    return [skipped(name, why) for name, why in VGPU_ONLY.items() if drafting or name != drafts.NAME]
