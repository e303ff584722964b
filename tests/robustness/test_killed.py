"""After a kill at any moment, folders hold whole documents or none, and leftover files do not disturb later runs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from signal import Signals

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from schedbench.profiles.record.files import write_whole
from schedbench.profiles.record.result import canonical, read
from tests.acceptance.runs import command_line, plain_environment, schedbench
from tests.robustness.hostile import rounds

FEW = ("--set", "workload.requests=30", "--set", "device.values=none")
COMMANDS = {
    "run": ("run", "mixed", *FEW),
    "sweep": ("sweep", "mixed", "--alone", "--over", "max_running_requests=4,8", *FEW),
    "compare": ("compare", "mixed", "--b", "overlap=false", *FEW),
}
# The exit code after each signal, unless the process ended before it.
ENDS = {Signals.SIGINT: 130, Signals.SIGTERM: 143, Signals.SIGKILL: -9}
SIGNALS = st.sampled_from(list(ENDS))
WRITER = """
from pathlib import Path
from signal import SIGTERM, signal
from sys import argv
from schedbench.profiles.record.files import write_whole

signal(SIGTERM, print)
while True:
    for letter in "ab":
        write_whole(Path(argv[1]), letter * 2**20)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all killed processes, so that each finds the leftovers of earlier ones."""
    return tmp_path_factory.mktemp("killed")


def killed(arguments: Sequence[str | Path], number: Signals, after: float) -> int:
    """Returns the exit code of a process that gets a signal after the given time."""
    process = subprocess.Popen(
        list(map(str, arguments)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=plain_environment(),
        text=True,
    )
    until_it_listens(process)
    time.sleep(after)
    process.send_signal(number)
    try:
        _, err = process.communicate(timeout=600)
    finally:
        process.kill()
    assert "Traceback" not in err, err
    return process.returncode


def until_it_listens(process: subprocess.Popen[str]) -> None:
    """Waits until the process has installed its handlers. A starting interpreter handles Ctrl-C in its own way, and
    SIGTERM not at all."""
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        caught = re.search(r"SigCgt:\s*(\w+)", status.read_text())
        if caught is not None and int(caught[1], 16) & 1 << signal.SIGTERM - 1:
            return
        time.sleep(0.01)


def documents(folder: Path) -> Iterator[Path]:
    """Returns the documents as a reader finds them."""
    return folder.rglob("*.json")


@pytest.mark.wide
@rounds(1)
@given(name=st.sampled_from(list(COMMANDS)), number=SIGNALS, after=st.floats(0, 4))
@example(name="run", number=Signals.SIGTERM, after=2.5)
@example(name="sweep", number=Signals.SIGKILL, after=2.5)
def test_results_are_whole(folder: Path, name: str, number: Signals, after: float) -> None:
    arguments = command_line(*COMMANDS[name], "--output-dir", folder / name)
    assert killed(arguments, number, after) in (0, ENDS[number])
    for path in documents(folder):
        if path.name in ("sweep.json", "compare.json"):
            assert json.loads(path.read_text())["schema_version"]
        else:
            read(path)


@pytest.mark.wide
def test_leftover_files_do_not_disturb_a_later_run(folder: Path) -> None:
    (folder / "sweep/runs").mkdir(parents=True, exist_ok=True)
    for name in ("sweep/.sweep.json.1", "sweep/runs/.0123-4567.json.1"):
        (folder / name).write_text("{")
    again = schedbench(*COMMANDS["sweep"], "--resume", "--format", "json", "--output-dir", folder / "sweep")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["cells"] == json.loads((folder / "sweep/sweep.json").read_text())["cells"]


@rounds(3)
@given(after=st.floats(0, 0.1))
def test_a_file_is_either_the_old_one_or_the_new_one(folder: Path, after: float) -> None:
    path = folder / "written.txt"
    path.write_text("a" * 2**20)
    assert killed([sys.executable, "-c", WRITER, path], Signals.SIGKILL, after) == -9
    assert path.read_text() in ("a" * 2**20, "b" * 2**20)
    for left in folder.glob(".written.txt.*"):
        left.unlink()


def test_a_failed_write_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full when the file is flushed."""

    def full(descriptor: int) -> None:  # noqa: ARG001
        raise OSError(28, "No space left on device")

    path = tmp_path / "x.json"
    write_whole(path, "old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space") as error:
        write_whole(path, "new")
    assert error.value.filename == str(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.json"]
    assert path.read_text() == "old"


def test_a_write_to_a_read_only_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, *_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "open", refused)
    monkeypatch.setattr(Path, "unlink", refused)
    with pytest.raises(OSError, match="Read-only") as error:
        write_whole(tmp_path / "x.json", "new")
    assert error.value.filename == str(tmp_path / "x.json")


def test_documents_are_utf_8_for_any_file_name() -> None:
    """A file's name may hold a byte that is not UTF-8, which Python's paths keep as a surrogate."""
    assert canonical({"run": "a\udcff.yaml"}).encode() == b'{\n"run": "a?.yaml"\n}\n'
