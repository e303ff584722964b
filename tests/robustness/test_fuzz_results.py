"""Stored results and timelines: any bytes are refused with a message, or can be compared and shown."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from schedbench.cli import compare_page
from schedbench.cli.page import markdown, print_page
from schedbench.profiles.cuda.kineto import call_kind, op_kind, rows
from schedbench.profiles.judge.compare import HEADLINE, VerdictRules, judge
from schedbench.profiles.judge.document import document as compared
from schedbench.profiles.judge.gates import GateError
from schedbench.profiles.judge.gates import parse as gate
from schedbench.profiles.judge.likeness import LikenessError
from schedbench.profiles.judge.sides import opened, parse
from schedbench.profiles.judge.trials import TrialPlan, TrialRequest, WorkloadError, conduct
from schedbench.profiles.judge.worker import SideError
from schedbench.profiles.record.result import Result, ResultError, canonical, read
from schedbench.scenarios.problems import ScenarioError
from tests.acceptance.runs import result_of
from tests.profiles.cuda.conftest import Trace
from tests.robustness.hostile import (
    FUZZED,
    VALUES,
    as_json,
    mutated,
    refuses_cleanly,
    replaced,
    rounds,
    spliced,
)

pytestmark = [pytest.mark.wide, *FUZZED]

RUN = {"id": "0", "command": "", "started": "", "wall_s": 0.0, "cancelled": False}
FEW = ("device.values=none", "workload.requests=3", "workload.arrival=burst", "workload.output_tokens=4")
STORED = json.loads((Path(__file__).parent.parent / "profiles/sample_result.json").read_text())
ECHO = 20_000  # messages quote the input
REFUSALS = (ResultError, SideError, LikenessError, WorkloadError)


@pytest.fixture(scope="module")
def sound() -> dict[str, Any]:
    return result_of("mixed", *FEW, hazards=True).document()


@rounds(150)
@given(
    content=mutated(STORED).map(lambda document: as_json(document).encode())
    | spliced(json.dumps(STORED).encode())
)
@example(content=b"[" * 10**6)
@example(content=b'{"schema_version": "1.0", "a":' * 10**5)
@example(content=b'{"schema_version": 1' + b"0" * 10**6)
@example(content=b"\xef\xbb\xbf{}")
@example(content="{}".encode("utf-16"))
def test_results(content: bytes) -> None:
    """A result that is read can be written, and is then the same."""
    with refuses_cleanly(ResultError):
        result = Result.from_json(content)
        assert Result.from_json(result.to_json()) == result


def verdict(a: str, b: str) -> None:
    rules = VerdictRules(0.5, 5.0, False, (gate("mixed.schedule.sync:0"),), HEADLINE)
    sides = opened(None, parse(a), parse(b), TrialRequest())
    with refuses_cleanly(*REFUSALS), sides as (baseline, candidate):
        found = judge(conduct(baseline, candidate, TrialPlan(), lambda *_: None), rules)
        content = compared(found, a=a, b=b, run=RUN)
        canonical(content)
        page = compare_page.page(content, 80)
        print_page(page, Console(file=StringIO()))
        markdown(page)


@rounds(60)
@given(data=st.data())
def test_results_that_are_compared(tmp_path: Path, sound: dict[str, Any], data: st.DataObject) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    a.write_text(as_json(data.draw(mutated(sound))))
    b.write_text(as_json(sound))
    verdict(str(a), str(b))
    verdict(str(a), str(a))


@rounds(40)
@given(text=st.text(max_size=40) | VALUES.map(as_json) | st.text(max_size=9).map("git:{}".format))
@example(text="engine.overlap=" + "x" * 5000)
@example(text="a" * 5000 + ".json")
@example(text="/dev/zero")
@example(text="\0.json")
def test_sides(text: str) -> None:
    with refuses_cleanly(SideError, ScenarioError, longest=ECHO):
        parse(text)


@rounds(40)
@given(text=st.text(max_size=40) | st.tuples(st.text(max_size=9), VALUES.map(str)).map(":".join))
@example(text="throughput:-" + "9" * 400 + "%")
def test_gates(text: str) -> None:
    with refuses_cleanly(GateError, longest=ECHO):
        gate(text)


@pytest.mark.parametrize("kind", ["pipe", "folder", "loop", "/dev/zero", "nowhere"])
def test_paths_other_than_files(tmp_path: Path, kind: str) -> None:
    replaced(tmp_path / "result.json", kind)
    with pytest.raises(ResultError), refuses_cleanly():
        read(tmp_path / "result.json")


def _recorded() -> dict[str, Any]:
    trace = Trace()
    trace.copy("HtoD (Pageable -> Device)", 1, size=64, blocking=True)
    trace.launch(20)
    trace.annotation("step", 0, 100)
    return trace.document()


@rounds(100)
@given(document=mutated(_recorded()))
@example(document={"traceEvents": [], "baseTimeNanoseconds": 1e999})
def test_traces_of_kineto(document: Any) -> None:
    with refuses_cleanly(ValueError):
        for row in rows(document) if isinstance(document, dict) else ():
            op_kind(row)
            call_kind(row.name)
