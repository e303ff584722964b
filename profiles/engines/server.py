"""The processes of an engine. Started as ``python -m schedbench.profiles.engines.server``, by any interpreter.

    client (schedbench)          supervisor                    zygote                          run
      commands, JSON lines ------- watches for the end of ----> imports the engine once
      answers, JSON lines <------------------------------------ forks for each run ----------> runs, answers, ends

The supervisor ends the zygote, and what it has started, once the client has ended for any reason. It also receives the
signals that an engine sends to its parent process while it is imported, as the zygote does during runs.

Until the interpreter is known to have what schedbench needs, nothing but the standard library is imported.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

from ..platform.interruption import sending_lost
from .failures import STACKS, Answer, failure, packed, unpacked

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from ..programs.hollow import HollowPackages
    from ..run.rank_context import RankContext
    from .adapter import EngineAdapter
    from .source import EngineSource
    from .turns import TurnLink

OLDEST: Final = (3, 11)  # the Python that schedbench needs
# What schedbench itself imports in these processes, by module, and what pip installs for it.
NEEDED: Final = {
    "torch": "torch>=2.11",
    "numpy": "numpy>=2.0",
    "yaml": "PyYAML>=6.0",
    "pydantic": "pydantic>=2.12.5",
    "safetensors": "safetensors>=0.5",
    "llguidance": "llguidance>=1.7",
    "triton": "triton>=3.6",
}
_VENV: Final = "engine-venv"  # in the working folder
STACK_SIGNAL: Final = signal.SIGUSR2  # at which an engine's processes write their Python stacks


def main(arguments: list[str]) -> int:
    """The supervisor. ``arguments``: the ends of the pipes for commands and answers, and folders to be removed where
    the client ends without having removed them. A signal that ends the zygote ends the supervisor, too."""
    commands, answers = int(arguments[0]), int(arguments[1])
    os.environ.pop("PYTHONSAFEPATH", None)  # it was set for the start of this process only
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    Answers(answers).write(beat=True)  # this is a Python interpreter
    zygote = os.fork()
    if zygote == 0:
        _begin_zygote(commands, answers)
    with suppress(OSError):  # the child does so, too: whichever comes first
        os.setpgid(zygote, zygote)
    os.close(answers)
    threading.Thread(target=_end_with_client, args=(commands, zygote), daemon=True).start()
    signal.signal(signal.SIGTERM, lambda number, frame: _kill(zygote))  # noqa: ARG005
    signal.signal(STACK_SIGNAL, lambda number, frame: _kill(zygote, number))  # noqa: ARG005
    _, status = os.waitpid(zygote, 0)
    _kill(zygote)  # the processes that the engine has left
    if _has_ended(commands, 0):
        for folder in arguments[2:]:
            shutil.rmtree(folder, ignore_errors=True)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def _end_with_client(commands: int, zygote: int) -> None:
    _has_ended(commands, None)
    _kill(zygote)


def _has_ended(commands: int, patience: float | None) -> bool:
    """Whether the client's end of the pipe is closed, at the latest after ``patience`` ms."""
    ends = select.poll()
    ends.register(commands, 0)  # the end of the writer is reported without being asked for
    return bool(ends.poll(patience))


def _kill(group: int, number: int = signal.SIGKILL) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def _write_stack_at_signal(rank: str) -> None:
    """At STACK_SIGNAL the stack of this process' main thread is written to the file of that rank, or of the import."""
    file = open(os.path.join(tempfile.gettempdir(), STACKS + rank), "w", encoding="utf-8")  # noqa: SIM115
    faulthandler.register(STACK_SIGNAL, file, all_threads=False)


def _begin_zygote(commands: int, answers: int) -> NoReturn:
    code = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGQUIT, lambda number, frame: None)  # noqa: ARG005
        _write_stack_at_signal("the import")
        with os.fdopen(commands, encoding="utf-8") as lines:
            Zygote(Answers(answers)).serve(lines)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


class Answers:
    """The client's end of the pipe. Processes that an engine forks have a copy of it, and write nothing to it."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._writer = os.getpid()

    def claim(self) -> None:
        """Make this process the one that writes."""
        self._writer = os.getpid()

    def write(self, **answer: Any) -> None:
        """Begins with a line break, since a process may have ended inside of a line."""
        if os.getpid() != self._writer:
            os._exit(0)
        rest = f"\n{json.dumps(answer)}\n".encode()
        while rest:
            rest = rest[os.write(self._number, rest) :]


class Zygote:
    """Imports the engine, and forks a process for each run. No process that runs has opened a GPU before."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def serve(self, lines: Iterable[str]) -> None:
        """``lines``: what to load, then one run on each line."""
        commands = iter(lines)
        opening = json.loads(next(commands, "null"))
        if opening is None:
            return
        lacks = lacking(sys.version_info[:2], opening["requires"], ours=opening["ours"])
        if lacks:
            self._answers.write(refused=lacks)
            return
        with ExitStack() as stack:
            try:
                engine = LoadedEngine.load(unpacked(opening["source"]), stack)
            except BaseException as error:
                self._answers.write(**failure(error, opening["watched"]))
                return
            threads = [
                thread.name for thread in threading.enumerate() if thread is not threading.main_thread()
            ]
            self._answers.write(loaded=engine.seconds, threads=threads, hollow=sorted(engine.hollow.names))
            for line in commands:
                self._run(engine, json.loads(line))

    def _run(self, engine: LoadedEngine, command: Answer) -> None:
        run = os.fork()
        if run == 0:
            self._begin_run(engine, command)
        _, status = os.waitpid(run, 0)
        self._answers.write(ended=os.waitstatus_to_exitcode(status))

    def _begin_run(self, engine: LoadedEngine, command: Answer) -> NoReturn:
        try:
            signal.signal(signal.SIGQUIT, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.unraisablehook = sending_lost(lambda: signal.SIGINT)
            self._answers.claim()
            self._answers.write(began=os.getpid())
            os.chdir(command["cwd"])
            try:
                result = engine.run(command["run"], self._answers)
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                self._answers.write(result=result)
            except BaseException as error:
                self._answers.write(**failure(error, str(engine.source.watched)))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)  # without the engine's own handlers of an exit, which may wait for its threads


class LoadedEngine(NamedTuple):
    """An imported engine, beside the ``hollow`` packages. ``seconds`` is what its import took, without that of
    schedbench and torch."""

    source: EngineSource
    adapter: EngineAdapter
    hollow: HollowPackages
    seconds: float

    @classmethod
    def load(cls, source: EngineSource, stack: ExitStack) -> LoadedEngine:
        """Absent packages are hollow until the ``stack`` is closed. Raises EngineError, and what the engine raises."""
        from .adapter import find_adapter
        from .names import EngineError

        adapter = find_adapter(source.name.adapter)
        os.environ.update(adapter.environment)
        import torch
        import torch.distributed.tensor  # at the first dispatch to a device of ours, torch would import it

        from ..platform.own_process import freeze_heap
        from ..programs.hollow import hollow_packages
        from .run import load_engine

        torch.set_num_threads(1)  # no pool of threads may exist when a run is forked
        sys.path.insert(0, str(source.path))
        begin = time.perf_counter()
        hollow = stack.enter_context(hollow_packages(adapter.hollow))
        load_engine(adapter)
        seconds = time.perf_counter() - begin
        module = sys.modules.get(adapter.package)
        found = next(iter(getattr(module, "__path__", ())), None)  # a package need not have an __init__.py
        if found is None or Path(found).resolve() != (source.path / source.package).resolve():
            raise EngineError(
                f"{source.name}: {adapter.package} was imported from {found}, not from its source"
            )
        gc.collect()
        freeze_heap()
        return cls(source, adapter, hollow, seconds)

    def run(self, task: str, answers: Answers) -> list[Answer]:
        """The reports of one run's ranks; ``task``: the arguments of ``EngineProcess.run``."""
        from .rank_processes import BEAT, run_ranks
        from .run import run_on_engine
        from .stages import StageLink
        from .turns import TurnLink

        def beat() -> None:
            answers.write(beat=True)

        def failed(error: BaseException) -> Answer:
            return failure(error, str(self.source.watched))

        resolved, options, ranks, extra_sinks = unpacked(task)

        def run(context: RankContext, link: TurnLink | None, beat: Callable[[], None]) -> Answer:
            _write_stack_at_signal(f"rank {0 if link is None else link.rank}")
            rank = context.rank if link is None else link.rank
            report = run_on_engine(self, resolved, options, context, link, extra_sinks, beat)
            return {"report": packed(report), "sinks": packed([*enumerate(extra_sinks)][rank : rank + 1])}

        def run_rank(rank: int, connection: Connection) -> Answer:
            kind = TurnLink if ranks[rank].stage is None else StageLink
            link = kind(rank, len(ranks), connection)
            return run(ranks[rank], link, lambda: connection.send(BEAT))

        if len(ranks) == 1:
            return [run(ranks[0], None, beat)]
        return run_ranks([context.name for context in ranks], run_rank, failed, beat)


def lacking(version: tuple[int, ...], requires: Mapping[str, str], *, ours: bool) -> str:
    """What this interpreter lacks of ``requires``, and the line that mends it; empty if nothing. ``ours``: it is the
    one that runs schedbench, whose packages are not to change, so that the line makes another one."""
    if version < OLDEST:
        return (
            f"is Python {'.'.join(map(str, version))}; schedbench needs {'.'.join(map(str, OLDEST))} or newer"
        )
    missing = {module: what for module, what in requires.items() if find_spec(module) is None}
    if not missing:
        return ""
    python = f"{_VENV}/bin/python"
    packages = " ".join(f"'{what}'" for what in (requires if ours else missing).values())
    mended = (
        f"; this line makes an interpreter of the engine's own, for --engine-python {python}:"
        f" {sys.executable} -m venv {_VENV} && {python}"
        if ours
        else f": {sys.executable}"
    )
    return f"lacks {', '.join(missing)}{mended} -m pip install {packages}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
