"""``schedbench watch``: run any torch program that was written for CUDA on the virtual GPU."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from .arguments import Meaning, Stopwatch, make_output_dir
from .errors import GATE_FAILED, INTERRUPTED, WORKLOAD_FAILED, UsageError
from .text import echo

if TYPE_CHECKING:
    from .answers import RunAnswer

_THIS = ("python", "python3")  # the interpreter that runs schedbench


def watch(
    command: Annotated[
        list[str],
        typer.Argument(metavar="-- python SCRIPT [ARGUMENT]...", help="The program and its arguments."),
    ],
    hardware: Annotated[str, typer.Option(metavar="NAME|FILE", help="The GPU to emulate.")] = "h200",
    hazards: Annotated[
        Literal["on", "off"], typer.Option(help="Find accesses to memory that no stream order separates.")
    ] = "on",
    meaning: Meaning = None,
    hollow: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A package that may be absent and whose kernels are not used."),
    ] = None,
    output_dir: Annotated[Path | None, typer.Option(help="Keep the result.json here.")] = None,
) -> RunAnswer:
    """Run a Python program written for torch on CUDA on the virtual GPU, unchanged, and print its copies, syncs and
    hazards by source line. What the program prints goes to stderr.

    Exit codes: 0 done; 1 hazards were found; 2 usage; 3 that Python has no schedbench; 4 the program failed; 130
    interrupted, or 143 terminated. Where it failed or was interrupted, what it had used of the GPU is printed; a
    second signal ends it at once, without a result.
    """
    python, script, *arguments = _program(command)
    from ..profiles.programs.watch import WatchRequest, run_watched
    from .answers import RunAnswer

    make_output_dir(output_dir)
    clock = Stopwatch()
    request = WatchRequest(script, tuple(arguments), hardware, hazards == "on", meaning, tuple(hollow or ()))
    found = run_watched(python, request, lambda text: echo(f"schedbench: {text}", err=True))
    run = clock.run(cancelled=found.run.cancelled)
    found = found.model_copy(update={"run": found.run.model_copy(update=run)})
    failure = found.run.failure
    remarks = [] if failure is None else [f"schedbench: {script}: {failure}"]
    code = WORKLOAD_FAILED if remarks else GATE_FAILED if found.undeclared else 0
    code = INTERRUPTED if found.run.cancelled else code
    return RunAnswer(found, remarks=remarks, exit_code=code).kept(output_dir)


def _program(command: list[str]) -> list[str]:
    """The interpreter, the script and its arguments. Raises UsageError."""
    python, *rest = command
    if not rest or not Path(python).name.startswith("python"):
        raise UsageError(f"watch runs Python programs: watch -- python SCRIPT, not {' '.join(command)}")
    if rest[0].startswith("-"):
        raise UsageError(f"watch takes a script, not Python's option {rest[0]}")
    if not Path(rest[0]).is_file():
        raise UsageError(f"{rest[0]}: no such script")
    found = sys.executable if python in _THIS else shutil.which(python)
    if found is None:
        raise UsageError(f"{python}: no such interpreter")
    return [found, *rest]
