"""Every copy of hosted KV is ordered, and each of the waits that order it is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from schedbench.profiles.record.result import HazardFinding, Hazards
from schedbench.sched.hisparse.coordinator import Coordinator
from schedbench.sched.relay.states import SLOT_REUSE, states
from tests.acceptance.runs import OUTGROWING, executed, hazards_in, resolved

pytestmark = pytest.mark.wide

SMALL = (*OUTGROWING, "engine.max_running_requests=4")


def hazards_of(*overrides: str) -> Hazards:
    return hazards_in(executed(resolved("hisparse", *SMALL, *overrides), hazards=True))


@pytest.mark.parametrize("values", ["real", "none"])
@pytest.mark.parametrize("state", states())
def test_a_state_shows_no_undeclared_hazard(state: str, values: str) -> None:
    found = hazards_of(f"engine.relay={state}", f"device.values={values}")
    assert found.findings == ()
    assert state != "latest" or not found.known


def test_staging_keeps_the_declared_slot_reuse() -> None:
    assert SLOT_REUSE in hazards_of("engine.relay=pr26425").known


def touched(findings: tuple[HazardFinding, ...]) -> set[tuple[str, str]]:
    """The names of both operations of each finding; a replay is a graph."""
    return {(f.first.op, f.second.op) for f in findings if f.second is not None}


def findings_without_wait(
    monkeypatch: pytest.MonkeyPatch, method: str, without: Callable[..., Any]
) -> set[tuple[str, str]]:
    monkeypatch.setattr(Coordinator, method, without)
    return touched(hazards_of("engine.relay=latest", "engine.cuda_graph=false").findings)


def test_a_decode_that_does_not_wait_for_the_backup_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decode overwrites the slot that is being copied, and reads KV on the host before it is written."""
    found = findings_without_wait(monkeypatch, "before_forward", lambda *_: None)
    assert ("back_up", "rope_and_store_kv") in found


def test_a_buffer_reset_under_a_forward_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found = findings_without_wait(monkeypatch, "_await_readers", lambda *_: None)
    assert ("plan_swap_in", "copy d2d") in found


def test_a_decode_before_staging_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(self: Coordinator) -> list[Any]:
        ready = list(self._staging)
        self._staging.clear()
        for req in ready:
            self._open_buffer(req)
        return ready

    found = findings_without_wait(monkeypatch, "collect_ready_reqs", at_once)
    assert {second for first, second in found if first == "back_up"} & {"swap_in", "rope_and_store_kv"}
