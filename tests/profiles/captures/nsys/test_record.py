"""The command that records: where it is looked for, its arguments, the program's environment, and the checks of its
output."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest
from typer.testing import CliRunner

from schedbench.cli.app import app
from schedbench.profiles.captures.capture import CaptureFileError
from schedbench.profiles.captures.files import Reader
from schedbench.profiles.captures.nsys.reader import scrub
from schedbench.profiles.captures.nsys.record import (
    VARIABLE,
    Nsys,
    RecordingRequest,
    command,
    environment,
    find,
    recorded,
)
from schedbench.profiles.platform.machine import MachineError
from schedbench.profiles.record.result import read
from tests.profiles.captures.exports import VERSIONS, looped

ORDER = RecordingRequest(["mixed", "--set=workload.requests=8"], "vgpu")


def test_the_command_captures_the_measured_workload_only(tmp_path):
    words = command(Nsys(tmp_path / "nsys", "2025.1"), ORDER, tmp_path / "capture", "s")
    options, program = words[: words.index(sys.executable)], words[words.index(sys.executable) :]
    assert {
        "--capture-range=nvtx",
        "--nvtx-capture=measure@schedbench",
        "--capture-range-end=stop",
        "--kill=none",
    } <= {*options}
    assert program[1:3] == ["-m", "schedbench.profiles.lab.single_run"]
    assert program[3:] == ["mixed", "--set=workload.requests=8", "--device", "vgpu", "--timed"]
    assert "--trace=nvtx" in options and not any("graph" in word for word in options)


@pytest.mark.parametrize("graphs", ["node", "graph"])
def test_the_graph_trace_mode_is_stated_on_a_gpu(tmp_path, graphs):
    words = command(
        Nsys(tmp_path / "nsys", "2025.1"), RecordingRequest(["mixed"], "cuda", graphs), tmp_path / "x", "s"
    )
    assert "--trace=cuda,nvtx,osrt" in words and f"--cuda-graph-trace={graphs}" in words


def test_the_program_gets_no_secrets_of_the_environment():
    kept = {"PATH": "p", "HOME": "h", "CUDA_VISIBLE_DEVICES": "0", "LC_ALL": "C"}
    given = environment({**kept, "API_KEY": "x", "CUDA_TOKEN": "y", "X": "z"})
    assert given == kept


def test_a_capture_is_exported_scrubbed_and_reported(fake, tmp_path):
    nsys = find(str(fake()), {})
    result, report = recorded(nsys, ORDER, tmp_path, {**os.environ, "API_KEY": "hunter2"})
    assert {kind: found.steps for kind, found in result.per_step.items()} == {
        "prefill": 1, "decode": 5, "decode.steady": 3,
    }  # fmt: skip
    assert report.is_file()
    assert "hunter2" not in (tmp_path / "environment").read_text()
    assert b"hunter2" not in (tmp_path / "capture.sqlite").read_bytes()
    assert b"hunter2" in (tmp_path / "made-up.sqlite").read_bytes()


def test_the_command_prints_and_keeps_the_result(fake, tmp_path):
    where = ("--nsys", str(fake()), "--output-dir", str(tmp_path / "kept"))
    done = CliRunner().invoke(app, ["profile", "mixed", "--device", "vgpu", *where])
    assert done.exit_code == 0 and "host ranges, ms" in done.output
    assert "wall-clock" in done.stderr and "scrubbed" in done.stderr
    kept = read(tmp_path / "kept" / "result.json")
    assert kept.labels.profiled and kept.run.command
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == [
        "capture.nsys-rep", "capture.sqlite", "result.json",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("behaviour", "expected", "message"),
    [
        ({"profile": "echo out of luck >&2; exit 7"}, 4, "exit code 7: out of luck"),
        ({"profile": "exit 0"}, 3, "the range of the workload did not arrive: .* receives no ranges of nvtx"),
        ({"profile": "exit 0"}, 3, "did not arrive: nvtx, which makes them, is not installed"),
        ({"ranges": False}, 3, "has no ranges of schedbench"),
        ({"export": "echo no licence; exit 3"}, 2, "could not export it: exit code 3: no licence"),
        ({"export": "true"}, 2, "could not export it"),
    ],
)
def test_a_failed_recording_is_reported(
    monkeypatch, fake, tmp_path, run_command, behaviour, expected, message
):
    if "not installed" in message:
        monkeypatch.setattr("schedbench.profiles.captures.nsys.record.version", lambda _: None)
    nsys, kept = fake(**behaviour), tmp_path / "kept"
    arguments = ("profile", "mixed", "--device", "vgpu", "--nsys", nsys, "--output-dir", kept)
    said = run_command(*arguments)
    assert said.code == expected and re.search(message, said.err)


@pytest.mark.parametrize("device", ["auto", "vgpu"])
def test_torchs_profiler_needs_a_gpu(monkeypatch, run_command, tmp_path, device):
    arguments = ("profile", "mixed", "--tool", "torch", "--device", device, "--output-dir", tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    said = run_command(*arguments)
    assert said.code == 3
    assert ("no CUDA device" if device == "auto" else "nothing of the virtual GPU") in said.err


def test_a_report_made_elsewhere_is_exported_for_reading(fake, tmp_path):
    (tmp_path / "x.nsys-rep").write_bytes(b"")
    found = Reader(nsys=str(fake())).read(tmp_path / "x.nsys-rep")
    assert found.per_step["decode"].steps == 5


@pytest.mark.parametrize("version", VERSIONS)
def test_a_scrubbed_export_gives_the_same_result(tmp_path, version):
    export = looped(version, model=True)
    export.put("PROFILER_OVERHEAD", start=0, end=500, globalTid=1, nameId=export.string("flush"))
    export.string("no row refers to this: SECRET=hunter3")
    whole = export.write(tmp_path / "capture.sqlite")
    other = tmp_path / "scrubbed"
    other.mkdir()
    scrub(whole, other / "capture.sqlite")
    assert Reader().read(other / "capture.sqlite").metrics == Reader().read(whole).metrics
    assert Reader().read(other / "capture.sqlite").environment == Reader().read(whole).environment
    content = (other / "capture.sqlite").read_bytes()
    assert b"hunter" not in content and b"hostname-of-a-user" not in content
    with closing(sqlite3.connect(other / "capture.sqlite")) as connection:
        assert connection.execute("SELECT name FROM META_DATA_EXPORT").fetchall() == [
            ("EXPORT_SCHEMA_VERSION",)
        ]


def test_report_writes_a_scrubbed_copy(tmp_path):
    source, shared = looped().write(tmp_path / "x.sqlite"), tmp_path / "shared.sqlite"
    done = CliRunner().invoke(app, ["report", str(source), "--scrubbed", str(shared)])
    assert done.exit_code == 0 and b"hunter2" not in shared.read_bytes()
    again = CliRunner().invoke(app, ["report", str(source), "--scrubbed", str(source)])
    assert isinstance(again.exception, CaptureFileError) and source.is_file()


def test_an_interrupted_recording_is_shut_down(fake, tmp_path, monkeypatch):
    """Without this the tool's daemon and the program would continue."""
    nsys = find(str(fake()), {})
    run = subprocess.run

    def interrupted(words, **more):
        if "profile" in words:
            raise KeyboardInterrupt
        return run(words, **more)

    monkeypatch.setattr(subprocess, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        recorded(nsys, ORDER, tmp_path, os.environ)
    lines = (tmp_path / "arguments").read_text().splitlines()
    assert lines[-1] == f"shutdown --session=schedbench-{os.getpid()} --kill=sigkill"


def test_doctor_names_the_nsys_that_is_used(fake):
    found = CliRunner(env={"SCHEDBENCH_NSYS": str(fake(version="2025.1.1.1"))}).invoke(app, ["doctor"])
    assert f"2025.1.1.1, {fake()}" in " ".join(found.output.split())
    none = CliRunner(env={"SCHEDBENCH_NSYS": "/nowhere"}).invoke(app, ["doctor"])
    assert "/nowhere is not an nsys that runs: install Nsight Systems" in " ".join(none.output.split())


def test_search_order_is_option_variable_path_and_usual_folders(fake, tmp_path):
    usual = fake("opt/nvidia/nsight-systems/2024.5.1/bin/nsys", version="2024.5.1")
    newer = fake("opt/nvidia/nsight-systems/2025.1.1/bin/nsys", version="2025.1.1")
    on_path = fake("path/nsys", version="2023.4.4.54-1v0")
    variable = fake("elsewhere/nsys", version="2022.4.2")
    named = fake("named/nsys", version="2021.5")
    path = {"PATH": f"{on_path.parent}:/usr/bin:/bin"}
    plain = {"PATH": str(tmp_path)}
    assert find(str(named), {**path, VARIABLE: str(variable)}, root=tmp_path).path == named
    assert find(None, {**path, VARIABLE: str(variable)}, root=tmp_path).path == variable
    assert find(None, path, root=tmp_path) == (on_path, "2023.4.4.54-1v0")
    assert find(None, plain, root=tmp_path).path == newer
    newer.unlink()
    assert find(None, plain, root=tmp_path).path == usual


def test_a_named_tool_is_used_or_refused_never_replaced(fake, tmp_path):
    on_path = fake("path/nsys")
    with pytest.raises(MachineError, match=r"/nowhere/nsys is not an nsys that runs: install Nsight Systems"):
        find("/nowhere/nsys", {"PATH": str(on_path.parent)}, root=tmp_path)
    with pytest.raises(MachineError, match="is not an nsys that runs"):
        find("/bin/true", {}, root=tmp_path)


def test_a_missing_tool_is_reported_with_what_to_install(tmp_path):
    with pytest.raises(
        MachineError, match=r"no Nsight Systems on this machine: install .* --nsys or SCHEDBENCH_NSYS"
    ):
        find(None, {"PATH": str(tmp_path)}, root=tmp_path)


def test_a_tool_that_does_not_run_is_named(fake, tmp_path):
    broken = fake("opt/nvidia/nsight-systems/2025.1.1/bin/nsys")
    broken.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(MachineError, match=r"nsys would not run"):
        find(None, {"PATH": str(tmp_path)}, root=tmp_path)
