"""The exit codes of errors, which are named as text so that the start of the program imports none of their modules."""

from __future__ import annotations

import errno
from types import MappingProxyType
from typing import Final

GATE_FAILED: Final = 1
USAGE: Final = 2
UNABLE: Final = 3
WORKLOAD_FAILED: Final = 4
INTERRUPTED: Final = 130
UNREAD: Final = 141  # the reader closed the output; the code of programs that SIGPIPE ends
TERMINATED: Final = 143
DEFECT: Final = 70  # of schedbench; a traceback is printed

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
        return UNABLE  # a file that cannot be read or written
    ancestors = (f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__)
    return next((EXIT_CODES[name] for name in ancestors if name in EXIT_CODES), None)


def message(error: BaseException) -> str:
    """The message for the user. For an OSError, the file and the reason."""
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
    if isinstance(error, MemoryError):
        return f"this machine has too little memory: {error}".removesuffix(": ")
    return str(error)
