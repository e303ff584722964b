"""``check`` finds nothing in ``latest`` on any shipped scenario, in any order that its streams allow."""

from __future__ import annotations

from pathlib import Path

import pytest

from schedbench.profiles.check import adversaries
from schedbench.profiles.check.examine import Examiner
from schedbench.scenarios import shipped
from schedbench.sched.relay.choice import choose
from tests.acceptance.runs import SHORTER, resolved
from tests.acceptance.test_mooncake import write_trace

FEW = 6  # requests
RANDOM_ORDERS = 8


def own_file(name: str, checkpoint: Path) -> tuple[str, ...]:
    """Returns the setting that a scenario requires from its user, if it does."""
    if name == "checkpoint":
        return (f"model.path={checkpoint}",)
    if name != "trace_mooncake":
        return ()
    return (f"workload.trace={write_trace(checkpoint / 'trace.jsonl', clients=FEW, turns=1)}",)


@pytest.mark.wide
@pytest.mark.parametrize("name", shipped.names())
def test_latest_passes_in_every_order(name: str, checkpoint: Path) -> None:
    few = (f"workload.requests={FEW}", *SHORTER.get(name, ()), *own_file(name, checkpoint))
    question = resolved(name, *few)
    report = Examiner(question, adversaries.seeds(RANDOM_ORDERS)).examine(choose("latest", {}))
    assert not report.failed
    asked = {check.name for check in report.checks if check.verdict == "passed"}
    assert {"run", "invariants", "contract", "hazards"} <= asked
