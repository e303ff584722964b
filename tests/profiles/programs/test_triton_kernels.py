"""Triton kernels of programs: values, one launch each, and their exact accesses."""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from schedbench.profiles.programs.watch import WatchRequest, run_watched
from tests.acceptance.runs import hazards_in
from tests.json_programs import output_of

NONE: list[str] = []
RACE = ["race"]
WATCHED = """
    import torch, triton
    import triton.language as tl

    @triton.jit
    def fill_row(table, row, value, WIDTH: tl.constexpr):
        tl.store(table + row * WIDTH + tl.arange(0, WIDTH), value)

    table, side = torch.zeros(4, 8, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for step in range(3):
        with torch.cuda.stream(side):
            fill_row[(1,)](table, step % 2, step, WIDTH=8)
        seen = table[1].clone()
        table[2].clone()
        torch.cuda.current_stream().wait_stream(side)
        side.wait_stream(torch.cuda.current_stream())
    print(seen.tolist())
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """The output of each case of ``triton_launches``. The variable must be set before the kernels are defined."""
    answer: dict[str, Any] = output_of("profiles.programs.triton_launches", TRITON_INTERPRET="1")
    return answer


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("values_and_one_launch", [[float(k + 2) for k in range(10)], 1500]),
        ("time_grows_with_bytes", 1500 + round(2 * 4 * (1 << 20) / 4.3e12 * 1e9)),
        ("masked_lanes_are_no_accesses", [NONE, RACE]),
        ("rows_are_exact", [NONE, RACE, NONE, NONE, RACE, NONE]),
        ("atomics_write", [RACE, [8, 0], [7]]),
        ("descriptors", [[NONE, [12 + k + 0.0 for k in range(4)]], [RACE, [12 + k + 0.0 for k in range(4)]]]),
        ("memory_by_address", [RACE, [3, 3]]),
        ("reads_behind_a_tensor_are_within_its_block", [2, 2, 2, 2, 2, 1, 1, 1]),
        ("decorators", [[[4.0] * 6, [8, 9, 10, 11, 12, 13]], ["tuned", "guessed"]]),
        ("graphs", [0, [10, 2, 0, 10, 2, 0], NONE, ["graph[2]", "graph[2]"]]),
        ("graphs_with_hazards", [NONE, RACE]),
        ("driver", ["cuda", 90, 132, True]),
        ("adversary", [0, [10, 2, 0, 10, 2, 0]]),
    ],
)
def test_a_launch_case_has_the_expected_output(found: dict[str, Any], name: str, expected: object) -> None:
    assert found[name] == expected


def test_refusals(found: dict[str, Any]) -> None:
    error, said = found["memory_of_no_tensor"]
    assert (error, "sum_by_address reads memory that belongs to no tensor" in said) == (
        "KernelBoundsError",
        True,
    )
    values, said, host_bytes = found["pinned_and_pageable_memory"]
    assert (values, host_bytes) == ([2, 2, 2, 2], [16])
    assert "cannot access pageable memory" in said


def test_without_values_races_are_found_and_reads_of_floats_are_reported(found: dict[str, Any]) -> None:
    kinds, total, said = found["values_none"]
    assert (kinds, total) == (RACE, [5])
    assert "add_one reads floats that are not computed" in said


def test_without_values_integers_are_computed_that_do_not_follow_from_floats(found: dict[str, Any]) -> None:
    gathered, said = found["values_apart"]
    assert gathered == [9, 7]
    assert [sentence.partition(": ")[2] for sentence in said] == [
        f"{kernel} reads floats that are not computed and writes values that follow"
        for kernel in ("index_of_sum", "decide")
    ]


@pytest.mark.wide
def test_a_race_of_a_watched_program_is_found_by_the_row(tmp_path: Path) -> None:
    """The kernel writes the rows 0 and 1."""
    script = tmp_path / "program.py"
    script.write_text(dedent(WATCHED))
    result = run_watched(sys.executable, WatchRequest(str(script), (), "h200", True, None))
    [finding] = hazards_in(result).findings
    assert finding.second is not None
    sites = [access.site.statement for access in (finding.first, finding.second) if access.site]
    assert sites == ["fill_row[(1,)](table, step % 2, step, WIDTH=8)", "seen = table[1].clone()"]
