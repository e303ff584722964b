"""How the process ends: the exit codes of errors, of signals and of a closed stdout."""

from __future__ import annotations

import errno
import io
import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, MappingProxyType
from typing import Final, TextIO

from ..profiles.platform.interruption import sending_lost
from ..profiles.platform.raised_at import own_frames

GATE_FAILED: Final = 1
USAGE: Final = 2
UNABLE: Final = 3
WORKLOAD_FAILED: Final = 4
INTERRUPTED: Final = 130
UNREAD: Final = 141  # the reader closed the output; the code of programs that SIGPIPE ends
TERMINATED: Final = 143
DEFECT: Final = 70  # of schedbench; a traceback is printed
_HANDLED: Final = (signal.SIGINT, signal.SIGTERM)

# Errors are named as text, so that the start of the program imports none of their modules.
EXIT_CODES: Final = MappingProxyType(
    {
        "schedbench.scenarios.problems.ScenarioError": USAGE,
        "schedbench.scenarios.records.TraceError": USAGE,
        "schedbench.sched.model.checkpoint.CheckpointError": USAGE,
        "schedbench.sched.model.grammar.GrammarError": USAGE,
        "schedbench.sched.relay.choice.RelayError": USAGE,
        "schedbench.profiles.platform.names.FaultError": USAGE,
        "schedbench.profiles.platform.hardware.HardwareError": USAGE,
        "schedbench.profiles.record.result.ResultError": USAGE,
        "schedbench.profiles.captures.capture.CaptureFileError": USAGE,
        "schedbench.profiles.captures.maps.MapError": USAGE,
        "schedbench.profiles.judge.gates.GateError": USAGE,
        "schedbench.profiles.judge.likeness.LikenessError": USAGE,
        "schedbench.profiles.judge.worker.SideError": USAGE,
        "schedbench.profiles.judge.worker.CrashError": WORKLOAD_FAILED,
        "schedbench.profiles.judge.trials.WorkloadError": WORKLOAD_FAILED,
        "schedbench.profiles.bench.bench.ProcessError": WORKLOAD_FAILED,
        "schedbench.profiles.run.crash.BrokenRunError": WORKLOAD_FAILED,
        "schedbench.profiles.programs.watch.ProgramError": WORKLOAD_FAILED,
        "schedbench.profiles.run.one_batch.OneBatchError": USAGE,
        "schedbench.profiles.run.system.NoProgressError": WORKLOAD_FAILED,
        "schedbench.profiles.sweeps.sweep.SweepError": USAGE,
        "schedbench.profiles.worth.worth.WorthError": USAGE,
        "schedbench.profiles.ranks.processes.WorldSizeError": USAGE,
        "schedbench.profiles.ranks.torchrun.TorchrunError": USAGE,
        "schedbench.profiles.captures.nsys.record.RecordingError": WORKLOAD_FAILED,
        "schedbench.profiles.lab.verification.VerificationError": WORKLOAD_FAILED,
        "schedbench.profiles.platform.machine.MachineError": UNABLE,
        "schedbench.profiles.platform.pool.MeasuredAloneError": USAGE,
        "schedbench.profiles.platform.pool.WorkersError": UNABLE,
        "schedbench.profiles.engines.names.EngineNameError": USAGE,
        "schedbench.profiles.engines.names.EngineError": UNABLE,
        "schedbench.profiles.engines.client.EngineFailedError": WORKLOAD_FAILED,
        "builtins.MemoryError": UNABLE,
        "schedbench.sched.memory.allocation.OutOfKVMemoryError": WORKLOAD_FAILED,
        "schedbench.sched.link.LinkError": WORKLOAD_FAILED,
    }
)


class UsageError(Exception):
    """The command line is invalid."""


def exit_code(error: BaseException) -> int | None:
    """None for a defect of the program, which is printed as a traceback."""
    if isinstance(error, UsageError):
        return USAGE
    if isinstance(error, OSError) and (error.filename is not None or error.errno == errno.ENOSPC):
        return USAGE if isinstance(error, IsADirectoryError) else UNABLE  # cannot be read or written
    ancestors = (f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__)
    return next((EXIT_CODES[name] for name in ancestors if name in EXIT_CODES), None)


def scheduler_line(error: BaseException) -> str:
    """File and line of the scheduler, or of a file of the user's, whose code raised the error, or is no Python; empty
    where other code did."""
    *_, innermost = (None, *own_frames(error))
    return f"{innermost.filename}:{innermost.lineno}" if innermost else ""


def message(error: BaseException) -> str:
    """The message for the user. For an OSError, the file and the reason."""
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
    if isinstance(error, MemoryError):
        return f"this machine has too little memory: {error}".removesuffix(": ")
    return str(error)


@dataclass(slots=True)
class Interruption:
    """``number`` is the last signal that arrived, 0 before there is one."""

    number: int = 0

    def handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.number = number
        raise KeyboardInterrupt

    @property
    def exit_code(self) -> int:
        return TERMINATED if self.number == signal.SIGTERM else INTERRUPTED


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """SIGINT and SIGTERM raise KeyboardInterrupt inside, unless the process was started to ignore them. An interrupted
    block exits with the code of the signal, also where Typer has made 1 of it."""
    interruption, report_lost = Interruption(), sys.unraisablehook
    before = {each: old for each in _HANDLED if (old := signal.getsignal(each)) is not signal.SIG_IGN}
    try:
        for number in before:
            signal.signal(number, interruption.handle)
        sys.unraisablehook = sending_lost(lambda: interruption.number)
        yield interruption
    except KeyboardInterrupt:
        raise SystemExit(interruption.exit_code) from None
    except SystemExit as end:
        marked = end.code == INTERRUPTED or (interruption.number and end.code == GATE_FAILED)
        raise SystemExit(interruption.exit_code if marked else end.code) from None
    finally:
        # After an interrupted exec of a string, python -m exits by SIGINT, unless another one follows.
        exec("")
        sys.unraisablehook = report_lost
        for number, handler in before.items():
            signal.signal(number, handler)


def open_closed_streams() -> None:
    """Open the null device in place of the standard streams that were closed when the process started: what is printed
    is discarded, and files and exit codes are as ever. In this order each gets the number of the closed descriptor."""
    sys.stdin = sys.stdin or os.fdopen(os.open(os.devnull, os.O_RDONLY))
    sys.stdout = sys.stdout or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    sys.stderr = sys.stderr or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


@contextmanager
def closed_pipe_noticed(stream: TextIO) -> Iterator[None]:
    """Exits with UNREAD where the reader of ``stream`` has closed the pipe. Libraries exit with 1 then, which means a
    failed gate here. They also close the stream, hence the duplicate of its descriptor."""
    try:
        pipe = os.dup(stream.fileno())
    except (OSError, io.UnsupportedOperation):
        yield
        return
    try:
        yield
    except SystemExit as end:
        raise SystemExit(UNREAD if end.code == GATE_FAILED and _is_closed(pipe) else end.code) from None
    finally:
        os.close(pipe)


def _is_closed(pipe: int) -> bool:
    poll = select.poll()
    poll.register(pipe, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
