"""Exit codes, and how an error becomes one: a line on stderr, never a traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import typer

GATE_FAILED: Final = 1  # a budget, a gate, a hazard, a difference
USAGE: Final = 2  # the command line or the scenario
CANNOT: Final = 3  # this machine, or a file that it cannot use
WORKLOAD_FAILED: Final = 4  # no request got anywhere
INTERRUPTED: Final = 130


@contextmanager
def failing() -> Iterator[None]:
    """Turns every error that a user can cause into its message and its exit code."""
    from ..profiles.machine import MachineError
    from ..profiles.result import ResultError
    from ..scenarios.problems import ScenarioError
    from ..scenarios.records import TraceError
    from ..sched.model.checkpoint import CheckpointError

    try:
        yield
    except (ScenarioError, TraceError, CheckpointError, ResultError) as error:
        complain(error, USAGE)
    except MachineError as error:
        complain(error, CANNOT)
    except OSError as error:
        complain(f"{error.filename or 'file'}: {error.strerror or error}", CANNOT)
    except KeyboardInterrupt:
        complain("interrupted before anything was measured", INTERRUPTED)


def complain(message: object, code: int) -> None:
    print(message, file=sys.stderr)
    raise typer.Exit(code)
