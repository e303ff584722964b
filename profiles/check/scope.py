"""What a check did not ask, so that a passed check is not taken for more than it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...scenarios.combinations import MODES, overlaps
from ..platform.resolve import Resolved
from ..vgpu.adversary.order import STRATEGIES, described
from . import adversaries
from .engine import NOT_ASKED
from .report import Report


def not_asked(resolved: Resolved, seeds: Sequence[int], reports: Sequence[Report]) -> dict[str, str]:
    """In words, by what was left out. ``seeds`` are those of the adversaries that were chosen."""
    return {name: text for name, text in _parts(resolved, seeds, reports) if text}


def _parts(resolved: Resolved, seeds: Sequence[int], reports: Sequence[Report]) -> Iterator[tuple[str, str]]:
    asked = {seed for report in reports for seed in seeds if _ran(seed, report)}
    scenario = resolved.scenario
    loop = "overlapped loop" if overlaps(scenario) else "serial loop"
    modes = [name for name, mode in MODES.items() if name != "overlap" and mode.on(scenario)]
    relays = [report.relay for report in reports]
    planted = sorted({fault.name for relay in relays for fault in relay.faults})
    yield "strategies", ", ".join(described(n) for n in range(len(STRATEGIES)) if n not in asked)
    yield "random orders", _all_but([f"seed {seed}" for seed in sorted(asked) if seed >= len(STRATEGIES)])
    yield "modes", _all_but([loop, *modes])
    if resolved.engine is not None:
        yield from NOT_ASKED.items()
        return
    yield "relays", _all_but(list(dict.fromkeys(relay.state.name for relay in relays)))
    yield "known bugs", _all_but(planted) + ("" if planted else " (--all-faults)")
    yield "scripted failures", "" if scenario.faults else "all"


def _ran(seed: int, report: Report) -> bool:
    """Whether the workload was run under the adversary."""
    applied = any(
        check.name == adversaries.NAME and check.verdict != "not applicable" for check in report.checks
    )
    return applied and report.result is not None and adversaries.concerns(seed, report.result)


def _all_but(names: Sequence[str]) -> str:
    return f"all but {', '.join(names)}" if names else "all"
