"""The result document of one rank."""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Final

from ...scenarios.schema import Scenario
from ..platform.machine import Machine
from ..platform.resolve import speculation
from ..record.environment import environment, tool
from ..record.provenance import RunPart, ScenarioPart
from ..record.result import RequestRow, Result, WorkloadPart
from .declared_hazards import hazards, ordering
from .passes import MeasuredRun
from .runner import Pass
from .system import System

# Kinds of steps that read what earlier steps have left in the relay.
_HANDED_ON: Final = {"decode", "verify"}


def result_of(
    scenario: Scenario,
    system: System,
    machine: Machine,
    found: MeasuredRun,
    run: RunPart,
    world: str | None,
) -> Result:
    """``world``: in which several ranks ran; None for a single engine."""
    return Result(
        tool=tool(),
        run=run,
        environment={
            **environment(),
            **machine.environment,
            **({"passes": found.passes} if found.passes else {}),
        },
        labels=machine.labels.model_copy(
            update={"acceptance": _acceptance(scenario, found.done), "world": world}
        ),
        scenario=ScenarioPart(expanded=scenario.expanded(), sha256=scenario.sha256),
        workload=WorkloadPart.model_validate(found.done.achieved, from_attributes=True),
        relay=system.relay_part(),
        hardware=machine.hardware,
        hazards=hazards(
            machine,
            system.declared_hazards,
            decoded=bool(_HANDED_ON & found.done.collector.counts.steps.keys()),
        ),
        ordering=ordering(machine),
        **{
            **found.parts._asdict(),
            "outputs": found.outputs,
            "requests": _counted_from(found.done.start, found.parts.requests),
        },
    )


def run_part(command: str, started: datetime, wall_s: float, done: Pass, machine: Machine) -> RunPart:
    return RunPart(
        id=uuid.uuid4().hex,
        command=command,
        started=started.isoformat(timespec="seconds"),
        wall_s=wall_s,
        emulation_speed=(done.end - done.start) / 1e9 / done.wall_s if machine.labels.emulated else None,
        cancelled=done.cancelled,
        failure=done.failure or None,
        hazards_s=None if machine.hazards is None else machine.hazards.spent / 1e9,
    )


def _acceptance(scenario: Scenario, done: Pass) -> str | None:
    if speculation(scenario) is None:
        return None
    return "simulated" if done.simulated else "measured"


def _counted_from(start: int, rows: tuple[RequestRow, ...]) -> tuple[RequestRow, ...]:
    """The rows with instants that count from the start of the measured workload."""
    return tuple(
        row.model_copy(
            update={
                name: value - start
                for name in ("arrival", "first_token", "finish")
                if (value := getattr(row, name)) is not None
            }
        )
        for row in rows
    )
