"""The printed table of combinations agrees with the code."""

from __future__ import annotations

from pathlib import Path

from schedbench.scenarios.combinations import RULES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "combinations.md"


def rows() -> list[str]:
    return [f"| {r.first} | {r.second} | {r.verdict} | {r.reason} |" for r in RULES]


def test_the_page_lists_every_rule_and_no_other() -> None:
    lines = PAGE.read_text().splitlines()
    table = [line for line in lines if line.startswith("| ")][1:]
    assert table == rows()
