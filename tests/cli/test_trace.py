"""A run's timeline is stored beside its result, and drawn as a trace whose slices nest."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace
from typer.testing import CliRunner

from schedbench.cli.app import app
from schedbench.cli.errors import UsageError, message
from schedbench.profiles.picture.trace import IDLE, LOOP, PROCESSES, STREAMS, content, events
from schedbench.profiles.record.files import ENDING
from schedbench.profiles.record.recording import (
    FILE,
    RecordedTimeline,
    TimelineRecording,
    read_recording,
    timeline_file,
)
from schedbench.profiles.record.result import OWN_CLOCKS, IdlePart, Metric, Result, ResultError
from schedbench.profiles.record.timeline import Site, Window
from schedbench.sched.link import LinkError
from tests.profiles.captures.exports import Export, sglang_loop
from tests.profiles.measure.conftest import Drawing

FEW = ("--set", "requests=6", "--set", "arrival=burst", "--set", "warmup_requests=1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The folder of a run."""
    kept = tmp_path_factory.mktemp("kept")
    done = CliRunner().invoke(app, ["run", "mixed", "--device", "vgpu", *FEW, "--output-dir", str(kept)])
    assert done.exit_code == 0
    return kept


def traced(source: Path, *more: str) -> list[dict]:
    done = CliRunner().invoke(app, ["trace", str(source), *more], catch_exceptions=False)
    assert done.exit_code == 0
    path = Path(done.output.partition(": ")[0])
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def test_a_folder_has_the_files_of_a_trace_and_no_temporary_ones(folder):
    assert sorted(path.name for path in folder.iterdir() if ENDING not in path.name) == ["result.json", FILE]


def test_the_trace_has_the_copies_of_the_result(folder):
    """Each copy is on its stream and on its engine, with its source line."""
    result = Result.from_json((folder / "result.json").read_text())
    drawn = traced(folder / "result.json")
    for direction in ("h2d", "d2h"):
        rows = [row for row in result.copies if row.direction == direction]
        slices = [
            event for event in drawn if event.get("cat") == direction and event["pid"] == STREAMS.number
        ]
        assert len(slices) == sum(row.count for row in rows)
        assert sum(event["args"]["bytes"] for event in slices) == sum(row.bytes for row in rows)
        lines = {f"{row.site.file}:{row.site.line}" for row in rows if row.site}
        assert {event["args"].get("line") for event in slices} == lines


def test_slices_of_a_track_nest(folder):
    tracks = defaultdict(list)
    for event in traced(folder):
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        opened: list[float] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while opened and opened[-1] <= start + 1e-6:
                opened.pop()
            assert not opened or end <= opened[-1] + 1e-6
            opened.append(end)


def test_every_track_has_a_name(folder):
    drawn = traced(folder)
    named = {(event["pid"], event["tid"]) for event in drawn if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in drawn if event["ph"] == "X"} <= named
    assert [event["args"]["name"] for event in drawn if event["name"] == "process_name"] == [
        f"the run, emulated h200: {process.name}" for process in PROCESSES
    ]


def flows(drawn: list[dict]) -> dict[int, tuple[dict, dict]]:
    """Returns the slices in which each flow begins and ends, by the rule of the format: those around its instants."""
    by_track = defaultdict(list)
    for event in drawn:
        if event["ph"] == "X":
            by_track[event["pid"], event["tid"]].append(event)
    found: dict[int, dict[str, dict]] = defaultdict(dict)
    for event in drawn:
        if event["ph"] in "sf":
            around = [
                piece
                for piece in by_track[event["pid"], event["tid"]]
                if piece["ts"] - 1e-4 <= event["ts"] < piece["ts"] + max(piece["dur"], 1e-3) - 1e-4
            ]
            found[event["id"]][event["ph"]] = min(reversed(around), key=lambda piece: piece["dur"])
    return {flow: (ends["s"], ends["f"]) for flow, ends in found.items()}


@pytest.mark.wide
def test_flows_connect_launches_with_kernels_and_ends_with_waits(folder):
    drawn = traced(folder)
    pairs = flows(drawn).values()
    launched = [to for _, to in pairs if to["cat"] == "kernel"]
    kernels = [
        event
        for event in drawn
        if event["ph"] == "X" and event["cat"] == "kernel" and event["pid"] == STREAMS.number
    ]
    assert len(launched) == len(kernels) > 100
    for start, to in pairs:
        if to["cat"] == "kernel":
            assert start["ts"] + start["dur"] == pytest.approx(to["args"]["launched_us"])
        if to["name"] == "waits for an event":
            assert start["ts"] + start["dur"] == pytest.approx(to["ts"] + to["dur"])
    waits = [event for event in drawn if event["ph"] == "X" and event["cat"] == "wait"]
    assert sum(to["cat"] == "wait" for _, to in pairs) == len(waits) > 0


def of(track, drawn: list[dict]) -> list[dict]:
    place = (track.process.number, track.number)
    return [event for event in drawn if event["ph"] == "X" and (event["pid"], event["tid"]) == place]


def test_steps_idle_time_and_counters_equal_the_result(folder):
    result = Result.from_json((folder / "result.json").read_text())
    drawn = traced(folder)
    steps = [event["name"] for event in of(LOOP, drawn)]
    assert len(steps) == sum(counts.steps for kind, counts in result.per_step.items() if "." not in kind)
    late = ("exposed host work", "exposed stall", "launch latency")
    found = sum(event["dur"] for event in of(IDLE, drawn) if event["name"] in late)
    assert isinstance(result.idle, IdlePart) and found == pytest.approx(result.idle.host_late_us)
    counters = defaultdict(list)
    for event in drawn:
        if event["ph"] == "C":
            counters[event["name"]] += event["args"].values()
    assert counters["copies"][-1] == sum(row.count for row in result.copies if row.direction != "kernel")
    assert (max(counters["running"]), max(counters["waiting"]), counters["waiting"][-1]) == (6, 6, 0)
    peak = result.metrics["peak_kv_tokens"]
    assert isinstance(peak, Metric) and max(counters["KV"]) == peak.values[0]


@pytest.mark.wide
def test_the_protobuf_equals_the_json(folder, tmp_path):
    """The protobuf is read back by the classes of the format."""
    paths = [tmp_path / name for name in ("x.pftrace", "x.pftrace.gz")]
    for path in paths:
        assert CliRunner().invoke(app, ["trace", str(folder), "--output", str(path)]).exit_code == 0
    plain, packed = (path.read_bytes() for path in paths)
    assert gzip.decompress(packed) == plain
    trace = Trace.FromString(plain)
    tracks = {
        packet.track_descriptor.uuid: packet.track_descriptor.name
        for packet in trace.packet
        if packet.HasField("track_descriptor")
    }
    opened, counted = defaultdict(list), defaultdict(list)
    slices, leads, follows = [], [], []
    for packet in trace.packet:
        event, at = packet.track_event, packet.timestamp
        if event.type == event.TYPE_COUNTER:
            counted[tracks[event.track_uuid]].append((at, event.counter_value))
        if event.type == event.TYPE_SLICE_BEGIN:
            opened[event.track_uuid].append((event.name, at))
        if event.type == event.TYPE_SLICE_END:
            slices.append((tracks[event.track_uuid], *opened[event.track_uuid].pop(), at))
        leads += event.flow_ids
        follows += event.terminating_flow_ids
    assert not any(opened.values()) and "the run, emulated h200" in tracks.values()
    assert sorted(leads) == sorted(follows) == sorted(set(leads))
    drawn = traced(folder)
    assert len(leads) == len(flows(drawn))
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in drawn if e["name"] == "thread_name"}
    expected = [
        (names[e["pid"], e["tid"]], e["name"], round(e["ts"] * 1e3), round((e["ts"] + e["dur"]) * 1e3))
        for e in drawn
        if e["ph"] == "X"
    ]
    assert sorted(slices) == sorted(expected)
    values = [
        (event["name"], round(event["ts"] * 1e3), value)
        for event in drawn
        if event["ph"] == "C"
        for value in event["args"].values()
    ]
    assert sorted(values) == sorted((name, *pair) for name, pairs in counted.items() for pair in pairs)


def test_the_same_run_draws_the_same_bytes(folder, tmp_path):
    traced(folder, "--output", str(tmp_path / "a.gz"))
    traced(folder, "--output", str(tmp_path / "b.gz"))
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()
    assert CliRunner().invoke(app, ["trace", str(folder), "--output", str(tmp_path / "c")]).exit_code == 0
    assert gzip.decompress((tmp_path / "a.gz").read_bytes()) == (tmp_path / "c").read_bytes()


@pytest.mark.parametrize("name", ["result.json", FILE, "nowhere/x.json"])
def test_a_trace_replaces_no_file_of_the_run(folder, name):
    before = (folder / "result.json").read_bytes()
    done = CliRunner().invoke(app, ["trace", str(folder), "--output", str(folder / name)])
    assert done.exit_code and str(folder / name) in message(done.exception)
    assert (folder / "result.json").read_bytes() == before


def test_windows_are_read_back_unchanged(folder):
    recorded = read_recording(folder / FILE)
    assert recorded.left_out == 0
    assert all(a.end == b.start for a, b in pairwise(recorded.windows))
    assert {op.kind for window in recorded.windows for op in window.ops} >= {"kernel", "h2d", "d2h"}
    assert recorded.sites and "forward" in recorded.streams.values()


def test_a_capture_is_drawn(tmp_path):
    export = Export()
    sglang_loop(export)
    drawn = traced(export.write(tmp_path / "x.sqlite"))
    assert sum(event.get("name") == "gemm" for event in drawn) == 12
    assert (tmp_path / f"x.{ENDING}").is_file()


def test_a_run_without_a_timeline_is_refused(folder, tmp_path):
    (tmp_path / "result.json").write_text((folder / "result.json").read_text())
    (tmp_path / "other.json").write_text((folder / "result.json").read_text())
    for source, error in ((tmp_path, UsageError), ("result.json", UsageError), ("other.json", ResultError)):
        done = CliRunner().invoke(app, ["trace", str(tmp_path / source)])
        assert isinstance(done.exception, error) and "output-dir" in str(done.exception)


@pytest.fixture
def ranks(folder, tmp_path) -> Path:
    """A folder with the timelines of ranks 0 and 2, and the parts of a result of three ranks."""
    for rank in (0, 2):
        (tmp_path / timeline_file(rank)).write_bytes((folder / FILE).read_bytes())
    document = json.loads((folder / "result.json").read_text())
    part = {"role": "pipeline", "metrics": {}, "idle": document["idle"], "per_step": document["per_step"]}
    document["ranks"] = [part | {"name": f"stage {rank}"} for rank in range(3)]
    (tmp_path / "result.json").write_text(json.dumps(document))
    return tmp_path


def test_timelines_without_a_result_are_those_of_a_killed_run(ranks):
    """The processes of a killed run leave timelines, and no rank writes a result."""
    (ranks / "result.json").unlink()
    done = CliRunner().invoke(app, ["trace", str(ranks)])
    assert isinstance(done.exception, UsageError)
    for word in ("no result.json", str(ranks / FILE), str(ranks / timeline_file(2))):
        assert word in str(done.exception)
    assert not (ranks / ENDING).exists()
    assert traced(ranks / timeline_file(2)) == traced(ranks / FILE)


@pytest.mark.wide
def test_a_reused_folder_has_only_the_last_run(ranks):
    """A run with fewer ranks leaves no timeline of the others, and a failed run leaves no result."""
    alone = ["run", "mixed", "--device", "vgpu", *FEW, "--output-dir", str(ranks)]
    assert CliRunner().invoke(app, alone).exit_code == 0
    # Only the folder's result has the arrival times of requests and the kind of times.
    of_result = {"waiting", "process_name"}
    whole, recorded = (
        [event for event in traced(path) if event["name"] not in of_result] for path in (ranks, ranks / FILE)
    )
    assert whole == recorded
    death = ("--set=engine.disaggregation={mode: pair}", "--set=faults=[{rank: decode 0, dies: forward}]")
    pair = ["run", "disagg", *FEW, *death, "--world", "distributed", "--output-dir", str(ranks)]
    assert isinstance(CliRunner().invoke(app, pair).exception, LinkError)
    assert not (ranks / "result.json").exists()


def test_a_rank_without_a_timeline_and_clocks_of_their_own_are_noted(ranks):
    done = CliRunner().invoke(app, ["trace", str(ranks)])
    assert done.exit_code == 0
    assert "nothing of stage 1 is drawn" in done.stderr and "clock" not in done.stderr
    document = json.loads((ranks / "result.json").read_text())
    document["idle"] = {"value": None, "abstained": OWN_CLOCKS}
    (ranks / "result.json").write_text(json.dumps(document))
    done = CliRunner().invoke(app, ["trace", str(ranks)])
    assert done.exit_code == 0
    assert "each rank has a clock of its own" in done.stderr


@pytest.fixture
def drawing() -> Drawing:
    return Drawing()


class Names:
    sites = (Site("a.py", "f", 1, "x"),)
    streams = {0: "schedule"}  # noqa: RUF012


def test_a_recording_is_cut_at_its_limit_with_a_note(drawing, tmp_path, monkeypatch):
    monkeypatch.setattr("schedbench.profiles.record.recording.MAX_RECORDS", 4)
    for step in range(10):
        drawing.forward(10 * step, 10 * step + 8, step=step)
    with TimelineRecording(tmp_path / FILE) as recording:
        recording.begin()
        for window in drawing.windows([20_000, 40_000, 60_000]):
            recording.feed(window)
        recording.finish(Names())
    found = read_recording(tmp_path / FILE)
    assert sum(len(window.ops) for window in found.windows) == 4
    assert found.left_out == 6


def test_the_last_pass_counts(drawing, tmp_path):
    drawing.forward(0, 8, step=0)
    with TimelineRecording(tmp_path / FILE) as recording:
        for _ in range(2):
            recording.begin()
            recording.feed(*drawing.windows())
        recording.finish(Names())
    assert len(read_recording(tmp_path / FILE).windows) == 1


def test_a_failed_run_leaves_no_timeline(tmp_path):
    with pytest.raises(ZeroDivisionError), TimelineRecording(tmp_path / FILE) as recording:
        recording.begin()
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


def test_lines_without_a_site_and_streams_without_a_name(drawing):
    drawing.op(0, 5, step=0, stream=42, site=7)
    drawing.wait(0, 2, step=0, stream=42)
    drawn = list(events(content(RecordedTimeline([*drawing.windows(), Window(0, 1)], (), {}))))
    assert any(event["args"].get("name") == "stream 42: waits" for event in drawn)
    assert not any("line" in event["args"] for event in drawn)
