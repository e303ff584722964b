"""``schedbench compare`` end to end on a small scenario, and its pages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from schedbench.cli import compare_page
from schedbench.cli.app import app
from schedbench.cli.page import markdown
from tests.cli.pages import printed

SMALL = """
name: small
model: {preset: tiny-llama, dtype: float32}
device: {values: none}
engine: {overlap: true, relay: pr25945, chunked_prefill_size: 64, max_running_requests: 4, kv_tokens: 2048}
workload:
  requests: 4
  arrival: {process: poisson, rate: 400}
  prompt_tokens: {dist: uniform, min: 16, max: 100}
  output_tokens: {dist: uniform, min: 4, max: 9}
"""


@pytest.fixture(scope="module")
def scenario(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("scenario") / "small.yaml"
    path.write_text(SMALL)
    return str(path)


def compare(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["compare", *map(str, arguments)])


@pytest.fixture(scope="module")
def kept(scenario, tmp_path_factory) -> Path:
    """The folder of a comparison of overlap off and on."""
    folder = tmp_path_factory.mktemp("kept")
    sides = ["--a", "overlap=false", "--b", "overlap=true", "--device", "vgpu", "--draws", "2"]
    done = compare(scenario, *sides, "--output-dir", folder)
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def document(kept) -> dict:
    return json.loads((kept / "compare.json").read_text())


def page(document, *, width=120) -> str:
    return printed(compare_page.page(document, width), width)


def test_all_results_are_stored(kept, document):
    runs = [f"run-{number:03d}.json" for number in range(5)]
    assert sorted(path.name for path in (kept / "a").iterdir()) == runs
    assert sorted(path.name for path in (kept / "b").iterdir()) == runs
    assert document["comparison"]["tokens"]["verdict"] == "equal"
    assert document["comparison"]["engagement"]["percent"] > 90


def test_the_line_of_a_barrier_is_named(scenario):
    sides = "--set relay=pr26425 --a relay=pr26425 --b relay.barrier=top --seeds 1 --quick --device vgpu"
    done = compare(scenario, *sides.split(), "--format", "json")
    changed = [line for line in json.loads(done.stdout)["comparison"]["lines"] if line["a"] != line["b"]]
    wait, function = "cudaStreamWaitEvent", "barrier_at_top"
    assert {(line["what"], line["site"]["function"], line["a"]) for line in changed} == {
        (wait, function, 0.0)
    }


def test_emulated_verdicts_are_tested_under_draws(document):
    """The page and the conclusion state in how many draws the sign holds; the document has the range."""
    found = document["comparison"]
    assert found["draws"] == {"count": 2, "abstained": None}
    for name, metric in found["metrics"].items():
        assert (metric["firmness"] is not None) == (name in found["headline"])
    firmness = found["metrics"]["output_throughput"]["firmness"]
    assert firmness["draws"] == 2 and firmness["low"] <= firmness["high"]
    assert f"({firmness['holding']} of 2 draws" in document["conclusion"]
    assert "over draws" in page(document)


def test_stored_results_give_the_comparison_of_their_runs(kept, document):
    again = compare("--a", kept / "a", "--b", kept / "b", "--format", "json")
    found = json.loads(again.stdout)["comparison"]
    assert again.exit_code == 0
    for name, metric in document["comparison"]["metrics"].items():  # stored results cannot be run under draws
        assert found["metrics"][name] == {**metric, "firmness": None}
    assert found["engagement"]["basis"] == "totals" and found["engagement"]["percent"] > 90


def test_the_same_side_twice_is_not_engaged(scenario):
    arguments = (scenario, "--a", "overlap=true", "--seeds", "1", "--device", "vgpu")
    shown = compare(*arguments)
    assert shown.exit_code == 0
    first = " ".join(shown.stdout.split())
    assert first.startswith(
        "as is against overlap=true on small (emulated h200, 1 seed): inconclusive: NOT_ENGAGED, as many device "
        "operations of each kind in all "
    )
    assert [first.count(text) for text in ("NOT_ENGAGED", "per step equal", "not asked")] == [1, 0, 0]
    asked = compare(*arguments, "--exit-on-inconclusive", "--format", "json")
    assert (asked.exit_code, json.loads(asked.stdout)["comparison"]["passed"]) == (1, False)


def test_an_interruption_of_the_draws_is_shown_where_the_change_is_not_engaged(document):
    found, why = document["comparison"], "interrupted after 1 of 4 runs under draws"
    found |= {"reasons": ["NOT_ENGAGED"], "draws": {"count": 0, "abstained": why}}
    assert why not in " ".join(page(document).split())
    document["run"]["cancelled"] = True
    shown = " ".join(page(document).split())
    assert why in shown and "cancelled: partial" in shown


@pytest.mark.parametrize(
    ("gate", "code"), [("decode.schedule.sync:0", 0), ("decode.forward.sync:0", 1), ("throughput:-99%", 0)]
)
def test_gates_decide_the_exit_code(kept, gate, code):
    done = compare("--a", kept / "a", "--b", kept / "b", "--gate", gate)
    assert done.exit_code == code
    assert ("passed" if code == 0 else "failed") in done.stdout


def test_other_tokens_are_a_failure_unless_allowed(kept, tmp_path):
    changed = json.loads((kept / "b" / "run-000.json").read_text())
    changed["requests"][1]["token_ids"][2] += 1
    changed["outputs"]["digest"] = "0" * 64
    (tmp_path / "other.json").write_text(json.dumps(changed))
    arguments = ("--a", kept / "a" / "run-000.json", "--b", tmp_path / "other.json")
    shown = compare(*arguments)
    request = changed["requests"][1]["id"]
    assert shown.exit_code == 1
    assert "inconclusive: OUTPUT_DIFF; tokens differ" in " ".join(shown.stdout.split())
    assert f"in request {request} at position 2" in " ".join(shown.stdout.split())
    assert compare(*arguments, "--allow-divergence").exit_code == 0


def test_a_stored_result_of_another_workload_is_refused(run_command, kept, scenario):
    sides = ("--a", kept / "a", "--b", "overlap=true", "--set", "workload.requests=3", "--device", "vgpu")
    said = run_command("compare", scenario, *sides)
    assert said.code == 2 and "workload.requests: 4 against 3" in said.err


@pytest.mark.parametrize(
    ("arguments", "unused", "why"),
    [
        ((), ("--seeds", "--pairs", "--quick"), "stored results are not run again"),
        (("--set", "device.host=measured"), ("--seeds", "--quick"), "times are measured"),
        (("--device", "vgpu"), ("--pairs",), "times are emulated"),
    ],
)
def test_options_without_an_effect_are_named(run_command, kept, scenario, arguments, unused, why):
    of = (scenario, "--b", "overlap=false") if arguments else (kept / "a", kept / "b")
    said = run_command("compare", *of, *arguments, "--seeds", 2, "--pairs", 2, "--quick")
    assert said.code == 0, said.err
    lines = [line for line in said.err.splitlines() if "has no effect" in line]
    assert lines == [f"schedbench: {option} has no effect: {why}" for option in unused]


@pytest.mark.parametrize("width", [80, 120, 200])
def test_no_line_of_a_page_is_too_wide(document, width):
    text = page(document, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text


@pytest.mark.parametrize("width", [80, 160])
def test_source_lines_are_folded_and_never_cut(document, width):
    site = {"file": "python/srt/managers/" + "batch_result_processor/" * 3 + "x.py", "line": 1127}
    site |= {"function": "f", "statement": "ids = " + "some(tokens) if here else " * 12}
    line = next(line for line in document["comparison"]["lines"] if line["a"] != line["b"])
    document["comparison"]["lines"] = [line | {"site": site}]
    text = page(document, width=width)
    heading, _, *shown = text[text.index("source line") :].splitlines()
    column = "".join(row[: heading.index("what")] for row in shown)
    assert f"{site['file']}:1127{site['statement']}".replace(" ", "") in column.replace(" ", "")


def test_waits_are_shown_at_once_where_only_they_changed(document):
    found = document["comparison"]
    line = next(line for line in found["lines"] if line["site"])
    found["lines"] = [line | {"a": 1.0, "b": 1.0, "exposed_a": 0.0, "exposed_b": 5.5}]
    title = "where the host's waiting showed"
    assert title not in compare_page.page(document).rest
    found["lines"][0]["b"] = 2.0
    assert title in compare_page.page(document).rest


def test_a_line_that_only_moved_is_neither_new_nor_gone(document):
    found = document["comparison"]
    site = {"file": "sched/new.py", "function": "g", "line": 7, "statement": "ids.item()"}
    line = {"range": "prepare", "kind": "decode", "stream": "schedule", "what": "d2h", "worth_pct": None}
    line |= {"site": site, "a": 0.0, "b": 1.0, "exposed_a": 0.0, "exposed_b": 0.0}
    before = line | {"site": site | {"file": "sched/old.py", "line": 3}, "a": 1.0, "b": 0.0}
    found["lines"] = [line, before]
    shown = [row.split() for row in page(document).splitlines()]
    start = shown.index(["sched/new.py:7", "d2h", "1.00", "1.00", "+0"])
    assert shown[start + 1][0] == "ids.item()"
    assert shown[start + 2] == ["moved", "from", "sched/old.py:3"]
    assert shown[start + 3][0] == "0"  # more lines
    found["lines"][1]["site"]["statement"] = "other.item()"
    assert "moved from" not in page(document)


def test_a_line_is_one_row_for_all_kinds_of_steps_and_shows_its_phase_where_it_has_several(document):
    found = document["comparison"]
    line = next(line for line in found["lines"] if line["a"] != line["b"] and line["kind"] == "decode")
    found["lines"] = [line, line | {"kind": "mixed"}, line | {"range": "elsewhere"}]
    rows = [row.split() for row in page(document).splitlines()]
    stream = line["stream"]
    assert [row[row.index(stream) :] for row in rows if stream in row and "·" in row] == [
        [stream, "·", "mixed,"],
        [stream, "·", "decode"],
    ]
    assert {("in", line["range"]), ("in", "elsewhere")} <= {tuple(row[-2:]) for row in rows}


def test_a_commit_is_named_once_in_the_header(document):
    found, sha = document["comparison"], "1051a8456f" * 4
    for side in ("baseline", "candidate"):
        found[side]["tool"] |= {"git_sha": "e" * 40, "dirty": False}
    assert compare_page.setting(document).endswith("overlapped) · both at eeeeeeeeee")
    engine = {"name": "sglang", "version": None, "ref": sha[:9], "commit": sha, "dirty": False}
    found["candidate"] |= {"engine": engine, "label": f"sglang:clone@{sha[:9]}"}
    assert compare_page.setting(document).endswith(
        "at eeeeeeeeee) · B sglang:clone@1051a8456 (sglang, overlapped)"
    )
    found["candidate"]["label"] = "result.json"
    assert compare_page.setting(document).endswith("B result.json (sglang at 1051a8456f, overlapped)")


def test_a_page_has_all_its_parts(document):
    text = page(document)
    for part in (
        "headline",
        "copies, syncs & stream waits per step",
        "where the GPU waited",
        "other metrics",
        "counts per step",
    ):
        assert part in text
    assert "on_host: list[int] = token_ids.tolist()" in text


def test_a_terminal_shows_one_screen_and_the_rest_with_all(kept):
    sides = ("--a", kept / "a", "--b", kept / "b")
    few, everything = (compare(*sides, *more).stdout for more in ((), ("--all",)))
    rest = ("other metrics", "counts per step: mean / worst step")
    assert all(f"\n{title}" not in few and f"\n{title}" in everything for title in rest)
    assert f"--all also shows: {', '.join(rest)}" in " ".join(few.split())
    assert len(few.splitlines()) < 75 < len(everything.splitlines())
    [shown, all_shown] = (text.split("where the GPU waited")[0].count("sched/") for text in (few, everything))
    assert shown == compare_page.FEW < all_shown


def test_markdown_is_ready_for_a_pull_request(document):
    text = markdown(compare_page.page(document, 160))
    assert text.startswith(f"**{document['conclusion']}**\n")
    assert f"`{document['run']['command']}`" in text
    assert "torch" in text.splitlines()[-1]
    assert text.count("<details>") == text.count("</details>") > 0
    tables = [line.count("|") for line in text.splitlines() if line.startswith("| output_throughput")]
    assert tables == [7]


def test_a_page_with_gates_notes_and_a_hint(document):
    found = document["comparison"]
    found["gates"] = [
        {"gate": "throughput:-2%", "outcome": "undecided", "seen": None, "why": "no pair is left"}
    ]
    found["hint"] = "14 more pairs, about 6 minutes, would resolve 1 %"
    text = page(document)
    assert "throughput:-2%" in text and "undecided no pair is left" in text
    assert "14 more pairs, about 6 minutes, would resolve 1 %" in text
    assert "compared: engine.overlap false (A), true (B)" in text


def test_a_measured_page_shows_intervals_and_missing_ones(document):
    found = document["comparison"]
    found["design"] = "blocks"
    found["metrics"]["retractions"] |= {"delta_pct": None, "ci_low": None, "ci_high": None}
    text = page(document, width=200)
    assert "95 % CI" in text and "ABBA blocks" in text
    lines = text.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("retractions"))
    assert [line.count("–") for line in lines[start : start + 2]] == [1, 1]


def test_a_change_against_the_direction_of_the_medians_is_explained(document):
    metric = document["comparison"]["metrics"]["ttft_ms"]
    explained = "of ttft_ms most changes go in another direction than from the median A to the median B"
    assert explained not in " ".join(page(document).split())
    metric |= {"a": 46.7, "b": 46.8, "delta_pct": -0.23}
    assert explained in " ".join(page(document).split())
    assert explained in markdown(compare_page.page(document, 160))


def test_charts_have_the_effects_and_where_the_gpu_waited(document):
    found = document["comparison"]
    effects, waits = compare_page.charts(found)
    metric = found["metrics"]["output_throughput"]
    [point] = [point for point in effects.points if point["y"] == "output_throughput"]
    assert (point["x"], point["low"], point["high"]) == (
        metric["delta_pct"],
        metric["ci_low"],
        metric["ci_high"],
    )
    assert "output_throughput, over draws" in [point["y"] for point in effects.points]
    causes = {part["part"]: part for part in found["idle"]}
    shown = {(point["y"], point["series"]): point["x"] for point in waits.points}
    assert shown["exposed host work", "A"] == causes["exposed_host"]["a"] > 0
