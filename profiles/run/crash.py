"""Errors that end a run: as text, with the line of the scheduler that raised them."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ... import sched
from ...sched.relay.choice import RelayChoice
from ..record.timeline import Site

_SCHEDULER_FOLDERS = tuple(Path(folder).resolve() for folder in sched.__path__)


class Crash(NamedTuple):
    """The type and message of an error, and the line of the scheduler that raised it."""

    error: str
    site: Site | None

    def __str__(self) -> str:
        where = f" (at {self.site.file}:{self.site.line}: {self.site.statement})" if self.site else ""
        return f"{self.error}{where}"


class BrokenRunError(RuntimeError):
    """A run with faults failed. The faults are the cause, not a defect of the tool."""

    def __init__(self, relay: RelayChoice, crash: Crash) -> None:
        names = " and ".join(fault.name for fault in relay.faults)
        super().__init__(f"with fault {names} the run broke down: {crash}")


def crash_of(error: BaseException) -> Crash:
    """The error with its notes, on one line."""
    name = type(error).__name__
    text = "; ".join([" ".join(str(error).split()), *getattr(error, "__notes__", ())])
    return Crash(f"{name}: {text}" if text else name, _site(error))


@contextmanager
def broken_on_purpose(relay: RelayChoice) -> Iterator[None]:
    """Inside, every error is attributed to the relay's faults, if it has any. Raises BrokenRunError."""
    try:
        yield
    except Exception as error:
        if not relay.faults:
            raise
        raise BrokenRunError(relay, crash_of(error)) from error


def _site(error: BaseException) -> Site | None:
    """The innermost line of the scheduler's own code."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename).resolve()
        for root in _SCHEDULER_FOLDERS:
            if path.is_relative_to(root):
                name = path.relative_to(root.parent).as_posix()
                return Site(name, frame.name, frame.lineno or 0, frame.line or "")
    return None
