"""Errors that end a run: as text, with the line of the scheduler, or of a file of the user's, that raised them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ...sched.relay.choice import RelayChoice
from ..platform.raised_at import own_frames
from ..record.timeline import Site


class Crash(NamedTuple):
    """The type and message of an error, and the line of the scheduler, or of a file of the user's, that raised it."""

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


class ExitedError(RuntimeError):
    """The scheduler, or a policy of the user's, has called ``sys.exit``."""


@contextmanager
def exits_are_crashes() -> Iterator[None]:
    """Inside, SystemExit becomes an error like any other. Raises ExitedError, with the traceback of the exit."""
    try:
        yield
    except SystemExit as end:
        raise ExitedError(f"sys.exit({end.code!r})").with_traceback(end.__traceback__) from None


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
    """The innermost line of the scheduler's own code, or of a file of the user's."""
    found = [frame for frame in own_frames(error) if frame is not None]
    if not found:
        return None
    return Site(found[-1].filename, found[-1].name, found[-1].lineno or 0, found[-1].line or "")
