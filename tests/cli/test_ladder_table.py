"""The printed ladder: one row per relay, in every format; and the list of states."""

from __future__ import annotations

import json
from typing import Any

import pytest

from schedbench.cli import ladder_page as shown
from schedbench.cli.html_page import to_html
from schedbench.cli.page import markdown, screenful
from schedbench.profiles.sweeps.conclusion import ladder_conclusion, rung_labels
from tests.cli.pages import printed
from tests.conftest import RunCommand


def rung(state: str, digest: str = "ab" * 32, **switches: str) -> dict[str, Any]:
    counts = {"schedule": {"h2d": {"median": 1.0}, "kernel": {"median": 4.5}}, "forward": {}}
    metrics = {
        "exposed_stall_us_per_step": {"values": [1.0, 2.0]},
        "exposed_host_us_per_step": {"values": [3.0, 3.0]},
        "forward_idle_us_per_step": {"values": [12.0]},
        "forward_occupancy": {"values": [0.5]},
        "output_throughput": {"abstained": "nothing was generated"},
    }
    return {
        "known_hazards": [],
        "changes": {},
        "result": {
            "run": {"cancelled": False},
            "labels": {"emulated": True, "host": "measured"},
            "hardware": {"name": "h200"},
            "requests": [{}, {}],
            "relay": {"state": state, "switches": {"barrier": "off", **switches}},
            "per_step": {"decode.steady": {"steps": 3, **counts}},
            "metrics": metrics,
            "outputs": {"digest": digest},
        },
    }


@pytest.fixture
def ladder() -> dict[str, Any]:
    return {
        "conclusion": "what the ladder shows",
        "scenario": {
            "expanded": {
                "name": "rungs",
                "about": "Three.",
                "engine": {"relays": [{"state": state} for state in ("first", "second", "second")]},
            }
        },
        "ladder": {"tokens_agree": True},
        "rungs": [
            rung("first"),
            rung("second", flatten="list", index="pool"),
            rung("second", flatten="numpy", index="pool"),
        ],
    }


def test_a_row_has_counts_by_stream_and_their_effect(ladder: dict[str, Any]) -> None:
    text = printed(shown.page(ladder))
    first, forward = [line for line in text.splitlines() if line.startswith("first, off")]
    assert first.split()[2:] == ["1/0/0/4.50", "4.50", "12.0", "–"]
    assert forward.split()[2:] == ["0/0/0/0", "50.0", "ababab"]
    assert text.startswith("what the ladder shows\n")
    assert "emulated h200, host time measured · 2 requests each" in text


def test_the_shipped_ladder_fits_80_columns(ladder: dict[str, Any]) -> None:
    counts = {
        "schedule": {name: {"median": 12.0} for name in ("h2d", "d2h", "sync", "kernel")},
        "forward": {},
    }
    for one in ladder["rungs"]:
        one["result"]["relay"] = {"state": "pr25774-before", "switches": {"barrier": "read-done"}}
        one["result"]["per_step"] = {kind: {"steps": 3, **counts} for kind in ("decode.steady", "prefill")}
    text = printed(screenful(shown.page(ladder)), 80)
    assert "…" not in text and "--all also shows: forward stream and tokens" in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_conclusion_compares_the_ends_and_names_the_largest_change(ladder: dict[str, Any]) -> None:
    assert (
        ladder_conclusion(ladder)
        == "3 relays, no times to compare; every relay gives the tokens it promises."
    )
    for one, value in zip(ladder["rungs"], (100.0, 104.0, 103.0), strict=True):
        one["result"]["metrics"]["output_throughput"] = {"values": [value]}
    assert ladder_conclusion(ladder) == (
        "second, off flatten=numpy gives +3.00 % output throughput against first, off (100 to 103 tokens/s, "
        "emulated h200, host time measured); largest change from one to the next: second, off flatten=list +4.00 %; "
        "every relay gives the tokens it promises."
    )
    ladder["rungs"][1]["result"]["run"]["cancelled"] = True
    assert ladder_conclusion(ladder) == "interrupted after 2 relays, no conclusion."


def test_the_largest_change_is_between_rungs_of_one_block(ladder: dict[str, Any]) -> None:
    relays = [("first", "off"), ("second", "off"), ("first", "top")]
    for one, value, (state, barrier) in zip(ladder["rungs"], (100.0, 104.0, 50.0), relays, strict=True):
        one["result"]["metrics"]["output_throughput"] = {"values": [value]}
        one["result"]["relay"] = {"state": state, "switches": {"barrier": barrier}}
    assert "largest change from one to the next: second, off +4.00 %;" in ladder_conclusion(ladder)


def test_kinds_of_no_relay_have_no_column(ladder: dict[str, Any]) -> None:
    assert "prefill" not in printed(shown.page(ladder)) and "steady" in printed(shown.page(ladder))


def test_relays_of_one_state_are_labelled_by_their_switches(ladder: dict[str, Any]) -> None:
    assert rung_labels(ladder) == ["first, off", "second, off flatten=list", "second, off flatten=numpy"]


def test_relays_of_one_name_are_labelled_by_their_files(ladder: dict[str, Any]) -> None:
    written = [f"{folder}/own.py:second" for folder in ("old", "new")]
    ladder["scenario"]["expanded"]["engine"]["relays"][1:] = [{"state": state} for state in written]
    for one in ladder["rungs"][1:]:
        one["result"]["relay"]["switches"] = {"barrier": "off"}
    assert rung_labels(ladder) == ["first, off", *(f"second, off {state}" for state in written)]


def test_relays_with_other_tokens_are_named(ladder: dict[str, Any]) -> None:
    ladder["ladder"]["tokens_agree"] = False
    assert "relays DIFFER that promise the same tokens" in ladder_conclusion(ladder)


def test_other_formats_have_the_same_rows(ladder: dict[str, Any]) -> None:
    table = [line for line in markdown(shown.page(ladder)).splitlines() if line.startswith("|")]
    assert len(table) == 2 * (2 + 3)
    rows = shown.as_csv(ladder).splitlines()
    assert len(rows) == 1 + 3
    assert rows[0].startswith("relay,switches,decode.steady.schedule.h2d,")
    assert rows[1].split(",")[:3] == ["first", "barrier=off", "1.0"]
    speed, exposed = shown.charts(ladder)
    assert [point["x"] for point in speed.points] == [None] * 3  # abstained
    assert [point["x"] for point in exposed.points] == [1.5, 3.0] * 3
    assert "ababab" in to_html(shown.page(ladder), charts=False)
    assert "<title>" in to_html(shown.page(ladder), charts=False)


def test_states_are_listed_with_their_changes(run_command: RunCommand) -> None:
    paragraphs = {text.split()[0]: text for text in run_command("list", "relays").out.strip().split("\n\n")}
    assert next(iter(paragraphs)) == "pr25774-before" and "latest" in paragraphs
    assert "#26020" in paragraphs["pr26020"]
    assert "advance: advance_host_side -> advance_new_tensor" in paragraphs["pr26020"]
    assert "hazard:" in paragraphs["pr25945"] and "hazard:" not in paragraphs["latest"]


def test_states_are_listed_as_json(run_command: RunCommand) -> None:
    entries = json.loads(run_command("list", "relays", "--format", "json").out)
    assert all(entry["name"] and entry["about"] and entry["expect"] for entry in entries)
    (after,) = (entry for entry in entries if entry["name"] == "pr25944")
    assert after["aliases"] == ["pr26020-before"] and after["before"] == "pr25944-before"
