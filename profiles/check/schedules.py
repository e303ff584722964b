"""The same workload under adversaries: whatever order the streams allow, the tokens are to be the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...sched.relay.states import RelayChoice
from ..crash import Crash
from ..execute import Options
from ..resolve import Resolved
from ..result import Abstained, Result
from ..vgpu.adversary.tempers import STRATEGIES, described
from .attempt import attempt
from .tokens import differences
from .verdicts import Check, Evidence, judged, skipped

NAME = "adversary"


def seeds(random: int) -> Sequence[int]:
    """Every strategy, then so many random ones."""
    return range(len(STRATEGIES) + random)


def check_schedules(resolved: Resolved, relay: RelayChoice, result: Result, chosen: Sequence[int]) -> Check:
    """``result`` is of the same run in program order."""
    if isinstance(result.outputs, Abstained):
        return skipped(NAME, result.outputs.abstained)
    found = [evidence for seed in chosen for evidence in _against(resolved, relay, result, seed)]
    return judged(NAME, found, about=f"the same tokens under {_counted(chosen)}")


def _against(resolved: Resolved, relay: RelayChoice, expected: Result, seed: int) -> Iterator[Evidence]:
    options = Options(device="vgpu", save_tokens=True, adversary=seed)
    outcome = attempt(resolved, relay, options)
    where = f"adversary {seed} ({described(seed)})"
    if isinstance(outcome, Crash):
        yield Evidence(f"{where}: {outcome}")
    elif outcome.result.outputs != expected.outputs:
        first = next(differences(outcome.result, expected))
        yield Evidence(f"{where}: {first.says}")


def _counted(chosen: Sequence[int]) -> str:
    strategies = sum(seed < len(STRATEGIES) for seed in chosen)
    parts = [f"{strategies} strategies"] if strategies else []
    parts += [f"{len(chosen) - strategies} random orders"] if len(chosen) > strategies else []
    return " and ".join(parts)
