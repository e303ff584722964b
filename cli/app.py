"""The command line: one Typer app over the modules of this package.

No heavy module is imported before a command runs; every command imports what it calls.
"""

from __future__ import annotations

import io
import re
import signal
import sys
import traceback
from collections import Counter
from contextlib import AbstractContextManager
from itertools import pairwise, takewhile
from typing import Annotated, Any, NoReturn

import typer

from ..profiles.platform.engine_choice import show_work
from ..profiles.platform.own_process import claim_process
from . import errors
from .baseline import baseline
from .bench import bench, doctor
from .calibrate import calibrate
from .check import check
from .command import command
from .compare import compare
from .explain import explain
from .init import init, schema
from .list import show
from .onebatch import onebatch
from .profile import profile
from .report import report
from .run import run
from .sweep import sweep
from .text import echo
from .trace import trace
from .verify import verify
from .watch import watch
from .worth import worth


class _Group(typer.core.TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Raises UsageError where an option follows another one that needs a value, which it would be taken for, for an
        option that only other commands have, and where one that has a single value is given again."""
        name, command, rest = super().resolve_command(ctx, args)
        options, typed = _options(command), [*takewhile(lambda text: text != "--", rest)]
        for option, value in pairwise(typed):
            if option in options and value in options and not options[option].is_flag:
                missing = options[option].metavar or "its value"
                raise errors.UsageError(f"{option}: {missing} is missing: the option {value} follows")
        for option, times in Counter(text.partition("=")[0] for text in typed if options).items():
            others = [other for other, known in self.commands.items() if option in _options(known)]
            if option not in options and others:
                raise errors.UsageError(
                    f"{option}: no option of {name}, but of {', '.join(others)}{_as_key(option, command)}"
                )
            if times > 1 and option in options and not (options[option].multiple or options[option].is_flag):
                raise errors.UsageError(f"{option}: given {times} times, and takes one value")
        return name, command, rest


class _Commands(_Group):
    def invoke(self, ctx: Any) -> Any:
        """A command that is interrupted before it has a result says so. Typer's refusals of a value are without
        pydantic's prefix, and with the choice that was probably meant."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            echo(f"schedbench: interrupted: {str(error) or 'there is no result'}", err=True)
            raise typer.Exit(errors.INTERRUPTED) from None
        except typer.BadParameter as error:
            said = error.message.removeprefix("Value error, ").removesuffix(".")
            if found := re.fullmatch(r"'(.*)' is not one of (.*)", said):
                from ..scenarios.problems import meant

                said += meant(found[1], re.findall(r"'([^']*)'", found[2]))
            error.message = said
            raise


def _as_key(option: str, command: Any) -> str:
    """How the command sets the key of a scenario that is named like an option of other commands."""
    from ..scenarios.overrides import keys

    name = option.removeprefix("--").replace("-", "_")
    named = (path for path in keys() if path[1:] and path[-1] == name)  # a section has no single value
    found = [".".join(path) for path in named] if "--set" in _options(command) else []
    return f"; --set {found[0]}=VALUE sets that key of the scenario" if len(found) == 1 else ""


def _options(command: Any) -> dict[str, typer.core.TyperOption]:
    params = command.params if command else ()
    typed = [param for param in params if isinstance(param, typer.core.TyperOption)]
    return {option: param for param in typed for option in param.opts}


app = typer.Typer(
    name="schedbench",
    cls=_Commands,
    help="Run, measure and judge an LLM inference scheduler, on CUDA or on a virtual GPU.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        from schedbench import __version__

        echo(f"schedbench {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


for answered in (run, compare, check, worth, profile, watch, sweep, onebatch):
    app.command()(command(answered, drawn=answered not in (check, watch, onebatch)))
for printed in (verify, report, trace, explain, init, schema, doctor, bench, calibrate):
    app.command()(printed)
app.command("list")(show)
app.add_typer(baseline, name="baseline", cls=_Group)


def main() -> None:
    """Run the command line. A usage error is printed as one message; a defect of the program as a traceback, with an
    exit code of its own."""
    errors.open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for terminals with a small character set
    show_work(_working)
    with errors.interruptible() as interruption, errors.closed_pipe_noticed(sys.stdout):
        try:
            app()
        except Exception as error:
            if interruption.number:
                # An interrupted import can make later code fail in any way. Such an error is one line, no traceback.
                if not _caused_by_interruption(error):
                    echo(f"schedbench: interrupted, which caused {type(error).__name__}: {error}", err=True)
                sys.exit(errors.INTERRUPTED)
            _exit_with(error)


def _working(text: str, seconds: float) -> AbstractContextManager[None]:
    from .console import working

    return working(text, seconds)


def console() -> None:
    """The entry point of the process. Signals are ignored once ``main`` has ended, so that the exit code stands."""
    claim_process()
    try:
        main()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def _caused_by_interruption(error: BaseException | None) -> bool:
    """Whether a KeyboardInterrupt, or the ImportError that an import makes of it, is among the causes."""
    while error is not None:
        if isinstance(error, ImportError | KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def _exit_with(error: Exception) -> NoReturn:
    code = errors.exit_code(error)
    if code is None:
        echo("".join(traceback.format_exception(error)).rstrip("\n"), err=True)
        line = errors.scheduler_line(error)
        if not line:
            sys.exit(errors.DEFECT)
        echo(f"schedbench: the scheduler crashed at {line}: {type(error).__name__}: {error}", err=True)
        sys.exit(errors.WORKLOAD_FAILED)
    echo(f"schedbench: {errors.message(error)}", err=True)
    sys.exit(code)
