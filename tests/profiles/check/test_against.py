"""What ``check --against`` takes for known, and what it says where it is interrupted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic_core import to_jsonable_python

from schedbench.profiles.check import engine
from schedbench.profiles.check.conclusion import conclusion
from schedbench.profiles.check.report import Check, Evidence, Report
from schedbench.profiles.platform.engine_choice import EngineChoice
from schedbench.profiles.platform.resolve import Resolved, ask
from schedbench.profiles.run.crash import Crash

BASE = EngineChoice("toy:base")


def report(asked: Resolved, *says: str, name: str = "toy:branch") -> Report:
    checks = [Check("hazards", "failed", "", tuple(map(Evidence, says)))]
    return Report(asked.relays[0], name, checks, object())  # type: ignore[arg-type]


def examined(monkeypatch: pytest.MonkeyPatch, of_branch: Report, of_base: Report) -> Report:
    asked = replace(ask("mixed"), engine=EngineChoice("toy:branch"))
    monkeypatch.setattr(
        engine, "_examine", lambda resolved, *_: of_base if resolved.engine == BASE else of_branch
    )
    return engine.examine_engine(asked, (), against=BASE)


@pytest.mark.parametrize(
    ("says", "is_known"),
    [
        ("buffer: the write at toy/loop.py:9, the last of 158 writes, is never read", True),
        ("buffer: the write at toy/other.py:7, the last of 155 writes, is never read", False),
        ("decode.forward.sync: 1 in the worst step; 70 steps had any: 70 times at toy/loop.py:8", True),
        ("decode.forward.sync: 2 in the worst step; 69 steps had any: 69 times at toy/loop.py:7", False),
    ],
)
def test_moved_lines_and_counts_of_steps_change_no_finding(
    monkeypatch: pytest.MonkeyPatch, says: str, is_known: bool
) -> None:
    base = (
        "buffer: the write at toy/loop.py:7, the last of 155 writes, is never read",
        "decode.forward.sync: 1 in the worst step; 69 steps had any: 69 times at toy/loop.py:7",
    )
    [found] = examined(monkeypatch, report(ask("mixed"), says), report(ask("mixed"), *base)).checks
    assert (found.verdict, len(found.known)) == (("passed", 1) if is_known else ("failed", 0))


def test_a_failure_under_an_adversary_is_known_whatever_the_name_of_the_source(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    says = "adversary 0: {}: the run failed: IndexError: index 9"
    asked = ask("mixed")
    of_base = report(asked, says.format("toy:base"), name="toy:base")
    [found] = examined(monkeypatch, report(asked, says.format("toy:branch")), of_base).checks
    assert (found.verdict, len(found.known)) == ("passed", 1)


@pytest.mark.parametrize(
    ("outcome", "says"), [(Crash("no", None), "crashes, too"), (object(), "does not crash")]
)
def test_a_crash_fails_and_the_other_source_is_run(
    monkeypatch: pytest.MonkeyPatch, outcome: object, says: str
) -> None:
    monkeypatch.setattr(engine, "attempt", lambda *_: outcome)
    found = examined(monkeypatch, replace(report(ask("mixed"), "crashed"), result=None), report(ask("mixed")))
    assert found.failed and found.against == "toy:base"
    assert found.checks[-1] == Check("against", "not applicable", f"the run of toy:base {says}")
    part = {
        "engine": None,
        "asked_engine": "b",
        "against": found.against,
        "checks": found.checks,
        "unproven": (),
    }
    content = {"scenario": {"expanded": {"name": "mixed"}}, "reports": [to_jsonable_python(part)]}
    assert conclusion(content) == f"mixed FAILED: hazards with b; the run of toy:base {says}; crashed."


def test_an_interruption_of_the_other_source_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    of_base = replace(report(ask("mixed")), cancelled=True)
    found = examined(monkeypatch, report(ask("mixed"), "a hazard"), of_base)
    assert found.cancelled and found.failed
    assert found.checks[-1].name == "against" and "toy:base" in found.checks[-1].about
