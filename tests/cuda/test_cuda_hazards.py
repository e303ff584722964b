"""The hazard checker on a GPU finds what the virtual GPU's finds: the faults, and of sound runs what is declared."""

from __future__ import annotations

import pytest

from schedbench.profiles.check.faults import fault_scenarios
from schedbench.profiles.platform.resolve import Resolved, ask
from schedbench.profiles.ranks.execute import Options, execute
from schedbench.profiles.record.result import Hazards

pytestmark = pytest.mark.cuda

# Those that hazards find on one device, without speculation.
FAULTS = (
    *("no-barrier", "nothing-kept-alive", "one-launch-kept-alive"),
    *("staging-refilled", "advance-in-place", "dead-publish"),
)


def hazards_of(question: Resolved) -> Hazards:
    found = execute(question, Options(device="cuda", hazards=True)).hazards
    assert isinstance(found, Hazards), found
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_shows_a_hazard(fault: str) -> None:
    assert hazards_of(fault_scenarios()[fault].question()).findings


@pytest.mark.parametrize(("state", "declared"), [("latest", 0), ("pr25774-before", 2)])
def test_a_sound_run_shows_declared_hazards_only(state: str, declared: int) -> None:
    found = hazards_of(ask("faults/mixing", [f"engine.relay={state}"]))
    assert (found.findings, len(found.known)) == ((), declared)
