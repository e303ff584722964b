"""The result document of one rank."""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Final, Literal

from ...scenarios.combinations import overlaps, staged
from ...scenarios.schema import Scenario
from ...sched.relay.choice import RelayChoice, loop_of
from ...sched.relay.switches import DRAFT_SWITCHES, OVERLAPPED_ONLY
from ..platform.machine import Machine
from ..platform.resolve import Resolved, speculation
from ..record.environment import environment, tool
from ..record.provenance import NO_RELAY, RelayPart, RunPart, ScenarioPart
from ..record.result import RequestRow, Result, WorkloadPart
from .declared_hazards import hazards, ordering
from .passes import MeasuredRun
from .runner import Pass

# Kinds of steps that read what earlier steps have left in the relay.
_HANDED_ON: Final = {"decode", "verify"}


def result_of(
    resolved: Resolved,
    relay: RelayChoice,
    machine: Machine,
    found: MeasuredRun,
    run: RunPart,
    world: str | None,
) -> Result:
    """``world``: in which several ranks ran; None for a single engine. An engine of another project has no relay, and
    declares no hazards."""
    scenario, own = resolved.scenario, resolved.engine is None
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
        relay=_relay(relay, scenario) if own else RelayPart(state=NO_RELAY, loop=_loop(scenario)),
        hardware=machine.hardware,
        hazards=hazards(
            machine,
            _known(relay, scenario) if own else (),
            decoded=bool(_HANDED_ON & found.done.collector.counts.steps.keys()),
        ),
        ordering=ordering(machine),
        **{
            **found.parts._asdict(),
            "outputs": found.outputs,
            "requests": _counted_from(found.done.start, found.parts.requests),
        },
    )


def _relay(relay: RelayChoice, scenario: Scenario) -> RelayPart:
    return RelayPart(
        state=relay.state.name,
        loop=_loop(scenario),
        policies=relay.policies(
            overlap=overlaps(scenario), speculation=speculation(scenario), staged=staged(scenario)
        ),
        switches=_switches(relay, scenario),
        faults=tuple(fault.name for fault in relay.faults),
    )


def _loop(scenario: Scenario) -> Literal["overlapped", "serial", "pipelined"]:
    return loop_of(overlap=overlaps(scenario), staged=staged(scenario))


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


def _switches(relay: RelayChoice, scenario: Scenario) -> dict[str, str]:
    """The switches that have an effect: a single stream has nothing to order, and some belong to the overlapped
    worker."""
    absent = set() if overlaps(scenario) else set(OVERLAPPED_ONLY)
    if speculation(scenario) != "v2":
        absent |= DRAFT_SWITCHES.keys()
    return {name: value for name, value in relay.switches.items() if name not in absent}


def _known(relay: RelayChoice, scenario: Scenario) -> tuple[str, ...]:
    return relay.known_hazards(
        overlap=overlaps(scenario), speculation=speculation(scenario), staged=staged(scenario)
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
