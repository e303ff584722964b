"""What lines of an engine are worth: the engine's process runs with the line changed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from schedbench.profiles.judge.effects import lines
from schedbench.profiles.platform.engine_choice import EngineChoice
from schedbench.profiles.platform.resolve import Resolved
from schedbench.profiles.ranks.execute import Options, execute
from schedbench.profiles.record.result import Result, WorthRow
from schedbench.profiles.worth.worth import with_worth, worth

from .conftest import WriteEngine

pytestmark = pytest.mark.wide

FILE = "python/toy/loop.py"
WAITS = """
import torch
known = []
def step(device):
    known.append(torch.zeros(1, device=device))
def settled(device):
    for _ in range({times}):
        known[0].item()
"""


def asked(question: Resolved, engine: str) -> tuple[Resolved, Result]:
    question = replace(question, engine=EngineChoice(engine))
    result = execute(question, Options(device="vgpu", save_tokens=True))
    return question, result


def test_a_wait_of_an_engine_is_worth_what_its_removal_gains(question: Resolved, toy: WriteEngine) -> None:
    found = worth(*asked(question, toy(WAITS.format(times=1))), lambda _: None, rooms=0).worth
    assert found is not None
    rows: dict[str, WorthRow] = {row.change: row for row in found.rows if row.site and row.site.file == FILE}
    assert set(rows) >= {"absent", "no wait"} and rows["absent"].output_throughput_pct
    bare = asked(question, toy(WAITS.format(times=0), folder="bare"))[1]
    base, gained = found.base["output_throughput"], bare.metrics["output_throughput"].values[0]
    assert rows["absent"].output_throughput_pct == pytest.approx(100 * (gained / base - 1), rel=0.05)
    assert all(row.site and not row.phase for row in found.rows)


def test_lines_that_differ_account_for_the_difference_wherever_they_stand(
    question: Resolved, toy: WriteEngine
) -> None:
    """The statement has another line number on each side."""
    a = asked(question, toy(WAITS.format(times=1), folder="a"))
    b = asked(question, toy("\n\n" + WAITS.format(times=3), folder="b"))
    found = with_worth(lines([a[1]], [b[1]]), a, b, lambda _: None)
    [part] = {line.worth_pct for line in found if line.site and line.site.file == FILE and line.a != line.b}
    before, after = (result.metrics["output_throughput"].values[0] for _, result in (a, b))
    assert part == pytest.approx(100 * (after / before - 1), rel=0.05)
