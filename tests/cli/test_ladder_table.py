"""A ladder as it is printed: one row per relay, in every form; and the list of states."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rich.console import Console

from schedbench.cli import ladder_page as shown
from schedbench.cli.page import markdown, print_page, to_html
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
            "labels": {"emulated": True},
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
        "scenario": {"expanded": {"name": "rungs", "about": "Three."}},
        "ladder": {"tokens_agree": True},
        "rungs": [
            rung("first"),
            rung("second", flatten="list", index="pool"),
            rung("second", flatten="numpy", index="pool"),
        ],
    }


def printed(ladder: dict[str, Any]) -> str:
    console = Console(width=120, record=True, color_system=None)
    with console.capture() as captured:
        print_page(shown.page(ladder), console)
    return captured.get()


def test_a_row_has_counts_by_stream_and_what_they_did(ladder: dict[str, Any]) -> None:
    text = printed(ladder)
    (first,) = [line for line in text.splitlines() if line.startswith("first, off")]
    assert first.split()[2:] == ["S", "1/0/0/4.50", "4.50", "12.0", "50.0", "–", "ababab"]
    assert "emulated · h200 · 2 requests each" in text
    assert text.endswith("tokens: every relay gives what it promises\n")


def test_kinds_that_no_rung_has_are_no_column(ladder: dict[str, Any]) -> None:
    assert "prefill" not in printed(ladder) and "decode.steady" in printed(ladder)


def test_rungs_of_one_state_are_told_apart_by_their_switches(ladder: dict[str, Any]) -> None:
    assert shown.labels(ladder) == ["first, off", "second, off flatten=list", "second, off flatten=numpy"]


def test_relays_that_differ_are_called_out(ladder: dict[str, Any]) -> None:
    ladder["ladder"]["tokens_agree"] = False
    assert "tokens: relays DIFFER that promise the same" in printed(ladder)


def test_other_forms_have_the_same_rows(ladder: dict[str, Any]) -> None:
    table = [line for line in markdown(shown.page(ladder)).splitlines() if line.startswith("|")]
    assert len(table) == 2 + 3
    rows = shown.as_csv(ladder).splitlines()
    assert len(rows) == 1 + 3
    assert rows[0].startswith("relay,switches,decode.steady.schedule.h2d,")
    assert rows[1].split(",")[:3] == ["first", "barrier=off", "1.0"]
    assert "ababab" in to_html(shown.page(ladder))
    assert "<title>" in to_html(shown.page(ladder))


def test_the_ladder_runs_from_the_command_line(run_command: RunCommand) -> None:
    said = run_command(
        "run", "mixed", "--format", "json", "--device", "vgpu",
        "--set", "engine.relays=[pr25774, latest]", "--set", "workload.requests=4",
        "--set", "measure.warmup_requests=0",
    )  # fmt: skip
    assert said.code == 0
    states = [rung["result"]["relay"]["state"] for rung in json.loads(said.out)["rungs"]]
    assert states == ["pr25774", "latest"]


def test_states_are_listed_with_what_they_change(run_command: RunCommand) -> None:
    paragraphs = {text.split()[0]: text for text in run_command("list", "relays").out.strip().split("\n\n")}
    assert next(iter(paragraphs)) == "pr25774-before" and "latest" in paragraphs
    assert "#26020" in paragraphs["pr26020"]
    assert "advance: advance_host_side -> advance_new_tensor" in paragraphs["pr26020"]
    assert "hazard:" in paragraphs["pr25945"] and "hazard:" not in paragraphs["latest"]


def test_states_are_objects_for_machines(run_command: RunCommand) -> None:
    entries = json.loads(run_command("list", "relays", "--format", "json").out)
    assert all(entry["name"] and entry["about"] and entry["expect"] for entry in entries)
    (after,) = (entry for entry in entries if entry["name"] == "pr25944")
    assert after["aliases"] == ["pr26020-before"] and after["before"] == "pr25944-before"
