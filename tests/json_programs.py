"""Programs that tests run in their own processes: those that print JSON, those of ranks, and whether one still runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from schedbench.profiles.ranks.processes import local_addresses

ROOT = Path(__file__).resolve().parents[1]


def output_of(module: str, *arguments: str, **environment: str) -> Any:
    """Runs a module of tests/ as a program and returns the JSON that it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"tests.{module}", *arguments],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@contextmanager
def rank_processes(module: str, ranks: int) -> Iterator[Sequence[subprocess.Popen[str]]]:
    """Starts a module of tests/ once for each rank, with the rank and a common port; kills what still runs at the
    end."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", f"tests.{module}", str(place.rank), str(place.port)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for place in local_addresses(ranks)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def is_running(process: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"
