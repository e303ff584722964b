"""A question with something broken on purpose, by the names of faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...scenarios.combinations import overlaps, staged
from ...scenarios.problems import meant
from ...scenarios.schema import Scenario
from ...sched.relay.choice import RelayChoice, RelayError
from ...sched.relay.faults import Fault, awaited_faults, faults
from ..platform.resolve import Resolved
from ..platform.speculation import speculation


class FaultError(ValueError):
    """A fault that does not exist, or not yet."""


def broken(resolved: Resolved, names: Sequence[str]) -> Resolved:
    """Every relay of the question with these faults. Raises FaultError, and RelayError for a fault that has no place
    in one of them."""
    wanted = [_fault(name) for name in dict.fromkeys(names)]
    for fault in wanted:
        if fault.hisparse and not resolved.scenario.engine.hisparse.enabled:
            raise FaultError(
                f"fault {fault.name} needs engine.hisparse.enabled=true, with a model that has an indexer"
            )
    return replace(
        resolved, relays=tuple(_with(relay, wanted, resolved.scenario) for relay in resolved.relays)
    )


def _with(relay: RelayChoice, wanted: Sequence[Fault], scenario: Scenario) -> RelayChoice:
    for fault in wanted:
        try:
            relay = relay.broken_by(
                fault, overlap=overlaps(scenario), speculation=speculation(scenario), staged=staged(scenario)
            )
        except RelayError as error:
            if relay.state.name in fault.states:
                raise
            raise RelayError(f"{error}: --relay {fault.states[0]} has it") from None
    return relay


def _fault(name: str) -> Fault:
    present, awaited = faults(), awaited_faults()
    if name in awaited:
        raise FaultError(f"fault {name} waits for {awaited[name].feature}, which this version does not have")
    if name not in present:
        hint = meant(name, [*present, *awaited]) or "; schedbench list faults has them all"
        raise FaultError(f"no fault {name!r}{hint}")
    return present[name]
