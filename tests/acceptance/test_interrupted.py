"""Ctrl-C and SIGTERM: the result up to that moment is kept and marked."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread

import pytest

from schedbench.profiles.record.result import Abstained, Result, read
from tests.acceptance.runs import command_line, plain_environment

pytestmark = pytest.mark.wide

# Minutes of work; requests arrive one after the other for as long.
LONG = ("mixed", "--set", "workload.requests=8000", "--set", "workload.arrival.rate=400")
PATIENCE_S = 100


class Interrupted:
    """A run whose stderr is a terminal, stopped by Ctrl-C or another signal once ``under_way`` has returned."""

    def __init__(
        self,
        *arguments: str | Path,
        under_way: Callable[[Interrupted], None],
        by: signal.Signals = signal.SIGINT,
    ) -> None:
        self._screen, stderr = pty.openpty()
        process = subprocess.Popen(
            command_line("run", *arguments),
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=plain_environment({"TERM": "xterm"}),
            text=True,
        )
        os.close(stderr)
        self._seen = b""
        watcher = Thread(target=self._watch)
        watcher.start()
        with process:
            try:
                under_way(self)
                process.send_signal(by)
                self.out, _ = process.communicate(timeout=PATIENCE_S)
            finally:
                process.kill()
                watcher.join()
                os.close(self._screen)
        self.code = process.returncode

    @property
    def err(self) -> str:
        return self._seen.decode()

    def _watch(self) -> None:
        """Reads the terminal, which would fill up otherwise, until the other end is closed."""
        with suppress(OSError):
            while read := os.read(self._screen, 65536):
                self._seen += read


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def some_are_done(run: Interrupted) -> None:
    """Waits until the progress bar counts a finished request."""
    until(lambda: re.search(r"\b[1-9]\d*/8000", run.err) is not None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def interrupted(folder: Path) -> Interrupted:
    return Interrupted(*LONG, "--format", "json", "--output-dir", folder, under_way=some_are_done)


@pytest.fixture(scope="module")
def kept(interrupted: Interrupted, folder: Path) -> Result:
    assert interrupted.code == 130
    return read(folder / "result.json")


def test_the_printed_document_is_the_stored_one(interrupted: Interrupted, kept: Result, folder: Path) -> None:
    assert json.loads(interrupted.out) == kept.document()
    assert sorted(file.name for file in folder.iterdir()) == ["result.json", "timeline.jsonl.gz"]
    assert "Traceback" not in interrupted.err


def test_the_result_is_marked_and_has_what_happened_before_the_interrupt(kept: Result) -> None:
    assert kept.run.cancelled
    assert kept.outputs == Abstained(abstained="the run was interrupted")
    ends = {(request.status, request.reason) for request in kept.requests}
    assert ends == {("finished", "length"), ("cancelled", "interrupted")}
    assert all((row.first_token is None) == (row.output_tokens == 0) for row in kept.requests)
    assert kept.per_step["decode"].steps > 0
    assert kept.copies


def test_sigterm_keeps_the_result_like_ctrl_c(tmp_path: Path) -> None:
    run = Interrupted(*LONG, "--output-dir", tmp_path, under_way=some_are_done, by=signal.SIGTERM)
    assert run.code == 143
    assert read(tmp_path / "result.json").run.cancelled
    assert sorted(file.name for file in tmp_path.iterdir()) == ["result.json", "timeline.jsonl.gz"]


@pytest.mark.parametrize(
    "ranks", ["engine.disaggregation={mode: pair, decode: 2}", "engine.data_parallel.ranks=2"]
)
def test_ranks_end_together(tmp_path: Path, ranks: str) -> None:
    """Each request is reported once, by the rank that had it."""
    run = Interrupted(*LONG, "--set", ranks, "--output-dir", tmp_path, under_way=some_are_done)
    result = read(tmp_path / "result.json")
    assert run.code == 130 and result.run.cancelled
    assert {request.status for request in result.requests} == {"finished", "cancelled"}
    assert len({request.id for request in result.requests}) == len(result.requests)


def test_processes_end_together_when_one_gets_the_signal(tmp_path: Path) -> None:
    def timelines_grow(_: Interrupted) -> None:
        until(lambda: len([file for file in tmp_path.iterdir() if file.stat().st_size > 10_000]) == 2)

    settings = ("engine.disaggregation={mode: pair}", "workload.requests=2000", "measure.warmup_requests=0")
    asked = (*LONG, *(f"--set={setting}" for setting in settings), "--world", "distributed")
    run = Interrupted(*asked, "--output-dir", tmp_path, under_way=timelines_grow)
    assert (run.code, run.err) == (130, "")
    assert read(tmp_path / "result.json").run.cancelled


def test_an_interrupt_before_the_first_request_keeps_nothing(tmp_path: Path) -> None:
    """The run is still reading its trace, a pipe without further data."""
    trace = tmp_path / "trace.jsonl"
    os.mkfifo(trace)
    writers: list[int] = []

    def trace_is_open() -> bool:
        with suppress(OSError):
            writers.append(os.open(trace, os.O_WRONLY | os.O_NONBLOCK))
        return bool(writers)

    arguments = ("trace_mooncake", "--set", f"workload.trace={trace}", "--output-dir", tmp_path)
    early = Interrupted(*arguments, under_way=lambda _: until(trace_is_open))
    os.close(writers[0])
    assert (early.code, early.out) == (130, "")
    assert "Traceback" not in early.err
    assert [file.name for file in tmp_path.iterdir()] == ["trace.jsonl"]
