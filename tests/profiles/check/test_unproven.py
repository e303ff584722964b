"""What a check names as unproven: the waits, events and references that its runs do not need."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from schedbench.profiles.check.runs import attempt
from schedbench.profiles.check.unproven import NOT_EXECUTED, NOT_NEEDED, places, unproven, without_references
from schedbench.profiles.platform.resolve import ask
from schedbench.profiles.ranks.execute import Options
from schedbench.profiles.record.result import Hazards, Result
from schedbench.sched.relay.faults import faults

SOURCE = """\
class Launch:
    def run(self, streams, kept):
        streams.wait(streams.forward, streams.schedule)
        self.done.record()
        streams.record(kept, streams.forward)
        self.context.kept_alive[0] = [kept]
        self.result.extra_keep_alive_refs += [kept]
        self.link.wait(("kv",), until)
"""


def test_places_are_found_by_their_syntax(tmp_path: Path) -> None:
    (tmp_path / "launch.py").write_text(SOURCE)
    found = list(places(tmp_path))
    assert [(place.kind, place.site.line) for place in found] == [
        ("wait", 3), ("event", 4), ("reference", 5), ("reference", 6), ("reference", 7)
    ]  # fmt: skip
    assert {place.site.function for place in found} == {"Launch.run"}


OVERRIDES = ("engine.relay=latest", "engine.overlap=true", "workload.output_tokens=6")


@pytest.fixture(scope="module")
def named() -> dict[str, dict[str, str]]:
    """Returns the named statements with their reason, by function."""
    question = ask("faults/mixing", [*OVERRIDES, "workload.requests=6"])
    fault = faults()["pd-overwritten-page"]  # without workers it changes nothing
    question = question.with_relay(question.relay.broken_by(fault, overlap=True))
    result = attempt(question, Options(device="vgpu", hazards=True))
    assert isinstance(result, Result)
    found: dict[str, dict[str, str]] = {}
    for entry in unproven(question, result, without_references(question, map)):
        found.setdefault(entry.site.function, {})[entry.site.statement] = entry.why
    return found


def test_an_implied_order_is_named(named: dict[str, dict[str, str]]) -> None:
    """In ``latest`` the schedule waits for the forward's reads before it allocates again."""
    assert named["resolve_fused"] == {"context.streams.record(source, context.streams.forward)": NOT_NEEDED}


def test_unexecuted_policies_are_named(named: dict[str, dict[str, str]]) -> None:
    """Policies of the running state that this workload does not use are named, and those of other states are not."""
    assert set(named["AfterSampling.before_rows_change"].values()) == {NOT_EXECUTED}
    assert "barrier_at_top" not in named


def test_policies_of_a_fault_are_not_named(named: dict[str, dict[str, str]]) -> None:
    """A fault's policy is broken code, which does not have to be executed."""
    assert "wait_for_schedule_alone" not in named


@pytest.mark.parametrize("function", ["resolve_then_isolate", "keep_in_ring", "_host_tokens", "mark_read"])
def test_needed_places_are_not_named(named: dict[str, dict[str, str]], function: str) -> None:
    assert function not in named


def test_a_few_requests_can_show_that_references_are_needed() -> None:
    """The run of all requests is made where they do not."""
    question = ask("faults/mixing", [*OVERRIDES, "workload.requests=9"])
    few = ask("faults/mixing", [*OVERRIDES, "workload.requests=6"])
    [[shown]] = map(list, without_references(question, map).values())
    [[of_all]] = map(list, without_references(few, map).values())
    assert shown is None and isinstance(of_all, Hazards) and of_all.findings


def test_a_run_without_a_timeline_has_the_same_requests_tokens_and_hazards() -> None:
    question = ask("faults/mixing", [*OVERRIDES, "workload.requests=6"])
    options = Options(device="vgpu", hazards=True, save_tokens=True)
    results = [attempt(question, replace(options, counted=counted)) for counted in (True, False)]
    whole, bare = (result for result in results if isinstance(result, Result))
    assert whole.per_step and not bare.per_step
    assert (whole.requests, whole.outputs, whole.hazards) == (bare.requests, bare.outputs, bare.hazards)
