"""The picture in a terminal and in Markdown, of one run and of a comparison."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from schedbench.cli.app import app
from schedbench.cli.strip import strips
from schedbench.profiles.picture.draw import picture
from schedbench.profiles.record.recording import read_recording
from tests.cli.pages import TINY


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    kept = tmp_path_factory.mktemp("kept")
    done = CliRunner().invoke(app, ["run", "mixed", *TINY, "--output-dir", str(kept), "--picture"])
    assert done.exit_code == 0
    (kept / "page.txt").write_text(done.output)
    return kept


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_strip_has_a_row_for_each_lane_and_fits_the_page(folder, width):
    scenes = picture({"": read_recording(folder / "timeline.jsonl.gz")})
    lines = [line.plain for line in strips(scenes, width)]
    assert max(map(len, lines)) <= width
    for scene in scenes:
        at = next(n for n, line in enumerate(lines) if line.startswith(scene.title))
        rows = lines[at + 1 :]
        assert [row[: len(lane.label)] for row, lane in zip(rows, scene.lanes, strict=False)] == [
            lane.label for lane in scene.lanes
        ]
        forward = next(row for row in rows if row.startswith("forward"))
        assert forward.count("█") > 10
        steps = next(row for row in rows if row.startswith("step "))
        assert all(f"╰{boundary.step}" in steps for boundary in scene.boundaries[-2:])


def test_the_idle_time_of_a_strip_is_that_of_its_lane(folder):
    (scene, *_) = scenes = picture({"": read_recording(folder / "timeline.jsonl.gz")})
    idle = next(lane for lane in scene.lanes if lane.name == "GPU idle")
    work = sum(piece.end - piece.start for piece in idle.slices if piece.kind == "exposed_host") / 1e3
    text = " ".join(" ".join(line.plain.split()) for line in strips(scenes, 100))
    assert f"w exposed host work {work:.1f} µs" in text


def test_run_and_report_draw_the_same_picture_before_the_tables(folder):
    page = (folder / "page.txt").read_text()
    assert page.index("GPU idle") < page.index("copies & syncs per step")
    for stored in ("table", "md"):
        done = CliRunner().invoke(
            app, ["report", str(folder / "result.json"), "--picture", "--format", stored]
        )
        assert done.exit_code == 0
        assert "\nGPU idle " in done.output and "╰" in done.output
    assert "```\ndecode" in done.output


def test_a_picture_leaves_no_timeline_and_changes_no_result(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    plain = CliRunner().invoke(app, ["report", str(folder / "result.json")]).output
    assert "╰" not in plain
    done = CliRunner().invoke(app, ["run", "mixed", *TINY, "--picture"])
    assert "╰" in done.output
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("schedbench")]


def test_compare_draws_a_above_b(folder):
    sides = ("--a", "relay=pr25945", "--b", "relay=latest", "--seeds", "1", "--draws", "0")
    done = CliRunner().invoke(app, ["compare", "mixed", *TINY, *sides, "--picture"])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    rows = [n for n, line in enumerate(lines) if line.startswith(("A forward", "B forward"))]
    assert [lines[n][0] for n in rows[:2]] == ["A", "B"]
    stored = CliRunner().invoke(app, ["compare", *[str(folder / "result.json")] * 2, "--picture"])
    assert stored.output.count("\nA GPU idle  ") == stored.output.count("\nB GPU idle  ") > 0


def test_the_docs_show_what_the_command_prints(monkeypatch):
    """Line numbers are left out, because they change."""
    page = (Path(__file__).parents[2] / "docs" / "pictures.md").read_text()
    command, shown = page.partition("    schedbench ")[2].splitlines()[0], page.split("```\n")[1]
    monkeypatch.setenv("COLUMNS", "80")
    done = CliRunner().invoke(app, command.split())
    printed = "\n".join(line.rstrip() for line in done.output.splitlines())
    assert wherever(shown) in wherever(printed)


def wherever(text: str) -> str:
    return re.sub(r"\.py:\d+", ".py", text)
