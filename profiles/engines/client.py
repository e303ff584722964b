"""Engines in processes of their own, as the rest of schedbench runs them. Nothing of an engine is imported here."""

from __future__ import annotations

import atexit
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Final, NamedTuple

from ...scenarios.combinations import MODES
from ...scenarios.schema import Scenario
from ...sched.relay.choice import RelayChoice
from ..platform.engine_choice import EngineChoice, working
from ..platform.resolve import Resolved
from ..record.result import Result
from ..run.rank_context import RankContext
from ..run.task import Options, RankReport, RouterReport
from .adapter import find_adapter
from .names import EngineError, parse_engine
from .server import NEEDED, SHOWN_LINES, SIGNALLED, STACK_SIGNAL, STACKS, Answer, packed, unpacked
from .source import EngineSource, PackagePlace, opened_source

_GRACE_S: Final = 10.0  # for a run that was interrupted to say what it has
_MOST_ENGINES: Final = 4  # processes that are kept, each with an imported engine
_ROOMS: Final = ("profiles", "scenarios", "sched")
_TEMPORARY: Final = "temporary"
_PACKAGE: Final = __name__.partition(".")[0]
_SERVER: Final = f"{__package__}.server"
_LOOK_S: Final = 1.0  # between two looks at whether the process is there
_QUIET_S: Final = 10.0  # without progress that are not shown
_STACK_S: Final = 1.0  # for the processes of an engine to write their stacks


class EngineFailedError(RuntimeError):
    """The engine raised an error, or its process ended or did not advance."""


def run_engine(
    choice: EngineChoice,
    resolved: Resolved,
    relay: RelayChoice,
    options: Options,
    ranks: Sequence[RankContext],
) -> Sequence[RankReport | RouterReport]:
    """Run once on that engine. Each of several ``ranks`` runs in a process of its own: the stages of a pipeline and
    workers that send each other KV at the same time, and workers that do not one after the other. Raises EngineError,
    EngineFailedError, KeyboardInterrupt, and what a run raises."""
    if options.device == "cuda":
        raise EngineError(
            f"{choice.name}: an engine of another project runs on the virtual GPU: --device vgpu"
        )
    engine = resolved.scenario.engine
    opened = _opened(choice)
    opened.refuse(resolved.scenario)
    staged = ranks[0].stage is not None and opened.has_stages
    apart = MODES["fake transfer"].on(resolved.scenario)
    linked = (MODES["disaggregation"].on(resolved.scenario) and opened.has_transfers and not apart) or (
        MODES["data-parallel ranks"].on(resolved.scenario) and opened.has_data_ranks
    )
    if len(ranks) > 1 and not (staged or apart or linked):
        raise EngineError(
            f"{choice.name}: the engine runs on one rank, and the scenario has {engine.ranks}; only the workers of"
            " engine.disaggregation={mode: pair, transfer: fake} run apart, one after the other"
        )
    if MODES["own model runner"].on(resolved.scenario) and not opened.has_own_runner:
        raise EngineError(
            f"{choice.name}: its adapter has no model runner of the engine's own: engine.model_runner=stub"
        )
    process = engine_process(choice)
    process.forget_printed()
    if staged:
        return process.run(resolved, relay, options, ranks)
    workers = [rank for rank in ranks if rank.place is None or rank.place.role != "router"]
    groups = [workers] if linked else [[worker] for worker in workers]
    reports = [report for group in groups for report in process.run(resolved, relay, options, group)]
    return reports if len(workers) == len(ranks) else [*reports, RouterReport((), "", 0)]


_engines: dict[EngineChoice, EngineProcess] = {}  # those that were used last are at the end


def engine_process(choice: EngineChoice) -> EngineProcess:
    """The process of that engine, which is started where there is none. Raises EngineError, EngineFailedError."""
    engine = _opened(choice)
    engine.start()
    return engine


def printed_by(choice: EngineChoice) -> str:
    """What that engine has printed in its last run, of all its workers."""
    return _opened(choice).printed()


def engine_source(choice: EngineChoice) -> EngineSource:
    """The source of that engine, without a process. Raises EngineError."""
    return _opened(choice).source


def _opened(choice: EngineChoice) -> EngineProcess:
    engine = _engines.pop(choice, None) or EngineProcess(choice)
    _engines[choice] = engine
    while len(_engines) > _MOST_ENGINES:
        _engines.pop(next(iter(_engines))).close()
    return engine


def end_engines() -> None:
    """End the processes of all engines."""
    while _engines:
        _engines.popitem()[1].close()


@atexit.register
def _end_with_program() -> None:
    """An interrupt while exported sources are removed would leave some of them."""
    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_engines()


class EngineProcess:
    """An engine's source, and the process that has imported it, which is started again after a failure."""

    def __init__(self, choice: EngineChoice) -> None:
        self._choice = choice
        self.timeout = choice.timeout
        self._stack = ExitStack()
        self._pipes: EnginePipes | None = None
        name = parse_engine(choice.name)
        self._adapter = find_adapter(name.adapter)
        place = PackagePlace(self._adapter.package, self._adapter.python_path)
        with working(f"reading the source of {choice.name}"):
            self.source: EngineSource = self._stack.enter_context(
                opened_source(name, place, wheels=choice.wheels)
            )
        self._ours = self._stack.enter_context(_our_package())
        self._output = self._stack.enter_context(_output())
        self._asked_at = self._forgotten = 0  # positions in the output
        self.has_stages = getattr(self._adapter, "stages", False)
        self.has_transfers = getattr(self._adapter, "transfers", False)
        self.has_data_ranks = getattr(self._adapter, "data_ranks", False)
        self.has_own_runner = getattr(self._adapter, "own_runner", False)
        self.import_s = 0.0
        self.threads: Sequence[str] = ()  # that the import has started, and a run does not have
        self.hollow: Sequence[str] = ()  # packages that are absent

    def refuse(self, scenario: Scenario) -> None:
        """Raises EngineError where the adapter refuses the scenario, before anything is imported."""
        if needs := getattr(self._adapter, "needs", lambda _: ())(scenario):
            raise EngineError(
                f"{self.source.name}: the engine cannot be run with this scenario: {'; '.join(needs)}"
            )

    def start(self) -> None:
        """Raises EngineError where the interpreter lacks something, EngineFailedError where the import fails."""
        if self._pipes is not None:
            return
        temporary = self.source.temporary
        self._pipes = EnginePipes(
            self._choice.python,
            self._ours,
            self._output,
            [self._ours, *([] if temporary is None else [temporary])],
        )
        requires = {**NEEDED, **self._adapter.requires}
        opening = {
            "source": packed(self.source),
            "watched": str(self.source.watched),
            "requires": requires,
            "ours": self._choice.python == sys.executable,
        }
        with working(f"importing {self._choice.name}"):
            answer = self._ask(opening, "its import")
        if "loaded" not in answer:
            self.end()
        if "refused" in answer:
            raise EngineError(f"{self._choice.name}: {self._choice.python} {answer['refused']}")
        self._raise(answer, "its import")
        self.import_s, self.threads, self.hollow = (answer[key] for key in ("loaded", "threads", "hollow"))

    def run(
        self, resolved: Resolved, relay: RelayChoice, options: Options, ranks: Sequence[RankContext]
    ) -> Sequence[RankReport]:
        """The reports of the ``ranks``, which run at the same time. Raises what ``run_engine`` raises."""
        task = packed((resolved, relay, options, ranks))
        answer = self._ask({"run": task, "cwd": os.getcwd()}, "the run")
        self._raise(answer, "the run")
        return [self._report(part) for part in answer["result"]]

    def _report(self, part: Answer) -> RankReport:
        result = Result.from_document(part["document"], name=self._choice.name)
        run = result.run.model_copy(update={"import_s": self.import_s})
        return RankReport(result.model_copy(update={"run": run}), *unpacked(part["rest"]))

    @property
    def pid(self) -> int | None:
        """The number of the process, if it runs."""
        return None if self._pipes is None else self._pipes.process.pid

    def end(self) -> None:
        """End the process. The source stays."""
        if self._pipes is not None:
            self._pipes.end()
            self._pipes = None

    def close(self) -> None:
        self.end()
        self._stack.close()

    def _ask(self, command: Answer, what: str) -> Answer:
        """The outcome of the command. Raises EngineFailedError where the process has none, KeyboardInterrupt."""
        assert self._pipes is not None
        self._asked_at = self._printed_bytes()
        self._pipes.write(command)
        try:
            return self._outcome(what, self.timeout)
        except KeyboardInterrupt:
            if self._pipes.interrupt():
                with suppress(EngineFailedError):
                    return self._outcome(what, _GRACE_S)
            self.end()
            raise

    def _outcome(self, what: str, patience: float) -> Answer:
        assert self._pipes is not None
        outcome: Answer | None = None
        try:
            while answer := self._next(what, patience):
                if "began" in answer:
                    self._pipes.run = answer["began"]
                elif "ended" in answer:
                    self._pipes.run = None
                    if outcome is None:
                        ending = _ending(answer["ended"])
                        raise self._failed(f"{what} did not end: its process {ending}")
                    return outcome
                elif "beat" not in answer:
                    outcome = answer
                    if self._pipes.run is None:
                        return outcome
        except TimeoutError:
            late = "took longer than" if self._pipes.run is None else "made no progress for"
            self._pipes.process.send_signal(STACK_SIGNAL)
            time.sleep(_STACK_S)
            self.end()
            stacks = self._stacks()
            at = ", ".join(f"{stack.at} ({stack.rank})" if len(stacks) > 1 else stack.at for stack in stacks)
            why = f"{what} {late} {patience:g} s (--engine-timeout), and was ended"
            shown = [f"Stack of {stack.rank} (most recent call last):\n{stack.text}" for stack in stacks]
            raise self._failed(f"{why}{at and f' at {at}'}", *shown) from None
        code, answered = self._pipes.process.wait(), self._pipes.answered
        self.end()
        if not answered:
            python = self._choice.python
            said = [f"no Python interpreter: {python}, which {_ending(code)}", *self._last_printed()]
            raise EngineError("\n".join(said))
        raise self._failed(f"{what} did not end: the engine's process {_ending(code)}")

    def _next(self, what: str, patience: float) -> Answer | None:
        """The next answer. Once a run has made no progress for a while, that is shown. Raises TimeoutError."""
        assert self._pipes is not None
        quiet = patience if self._pipes.run is None else min(_QUIET_S, patience)
        with suppress(TimeoutError):
            return self._pipes.next(quiet)
        with working(f"{self._choice.name}: waiting for {what}, limit {patience:g} s", quiet):
            return self._pipes.next(patience - quiet)

    def _stacks(self) -> list[_Stack]:
        """Those that the engine's processes have written."""
        files = sorted((self._ours / _TEMPORARY).glob(f"{STACKS}*"))
        found = [_Stack.read(file, str(self.source.watched)) for file in files]
        for file in files:
            file.unlink()
        return [stack for stack in found if stack is not None]

    def _raise(self, answer: Answer, what: str) -> None:
        if "interrupted" in answer:
            raise KeyboardInterrupt
        if "raised" in answer:
            error: BaseException = unpacked(answer["raised"])
            raise error
        if "failed" in answer:
            raise self._failed(f"{what} failed: {answer['failed']}", answer["traceback"])

    def _failed(self, why: str, *below: str) -> EngineFailedError:
        """``why`` is one line. What the engine has printed follows, and the texts ``below``."""
        return EngineFailedError("\n".join([f"{self._choice.name}: {why}", *self._last_printed(), *below]))

    def _last_printed(self) -> list[str]:
        """The last lines that the engine has printed since it was asked, below a title; empty where there are none."""
        lines = self._output_from(self._asked_at).splitlines()
        shown = lines[-SHOWN_LINES:]
        part = f" (the last {len(shown)} of {len(lines)} lines)" if len(shown) < len(lines) else ""
        return [f"What it printed{part}:", *shown] if lines else []

    def printed(self) -> str:
        """What the engine has printed since ``forget_printed``."""
        return self._output_from(self._forgotten)

    def forget_printed(self) -> None:
        self._forgotten = self._printed_bytes()

    def _printed_bytes(self) -> int:
        return os.fstat(self._output.fileno()).st_size

    def _output_from(self, position: int) -> str:
        text = os.pread(self._output.fileno(), self._printed_bytes() - position, position)
        return text.decode(errors="replace").rstrip()


class EnginePipes:
    """The started process, whose ``output`` gets what it prints, and the pipes to it. ``run`` is the number of the
    process that runs at present. ``answered``: the process has written an answer, as its supervisor does first."""

    def __init__(self, python: str, ours: Path, output: IO[bytes], removed: Sequence[Path]) -> None:
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        self._buffer = b""
        self.run: int | None = None
        self.answered = False
        path = os.pathsep.join(part for part in (str(ours), os.environ.get("PYTHONPATH", "")) if part)
        try:
            self.process = subprocess.Popen(
                [python, "-m", _SERVER, str(commands), str(answers), *map(str, removed)],
                pass_fds=[commands, answers],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={
                    **os.environ,
                    "PYTHONPATH": path,
                    "PYTHONSAFEPATH": "1",
                    "PYTHONUNBUFFERED": "1",  # what a process printed before it was ended is there
                    "TMPDIR": str(ours / _TEMPORARY),
                },
                start_new_session=True,  # signals of the terminal are for the parent alone
            )
        except OSError as error:
            os.close(self._commands)
            os.close(self._answers)
            why = "is a folder" if os.path.isdir(python) else f"cannot be started: {error.strerror}"
            raise EngineError(f"no Python interpreter: {python} {why}") from None
        finally:
            os.close(commands)
            os.close(answers)

    def write(self, command: Answer) -> None:
        rest = f"{json.dumps(command)}\n".encode()
        with suppress(BrokenPipeError):  # the reader finds the process ended
            while rest:
                rest = rest[os.write(self._commands, rest) :]

    def next(self, patience: float) -> Answer | None:
        """The next answer; None where the process has ended. Raises TimeoutError after ``patience`` seconds."""
        deadline = time.monotonic() + patience
        while True:
            line, found, rest = self._buffer.partition(b"\n")
            if not found:
                if not self._read(deadline):
                    return None
                continue
            self._buffer = rest
            with suppress(ValueError):  # a line that a process was ended in
                answer: Answer = json.loads(line or b"0")
                if answer:
                    self.answered = True
                    return answer

    def _read(self, deadline: float) -> bool:
        """Wait for more; False where there will be none."""
        ready = select.poll()
        ready.register(self._answers, select.POLLIN)
        while not ready.poll(_LOOK_S * 1000):
            if self.process.poll() is not None and not ready.poll(0):
                return False
            if time.monotonic() > deadline:
                raise TimeoutError
        more = os.read(self._answers, 1 << 16)
        self._buffer += more
        return bool(more)

    def interrupt(self) -> bool:
        """Interrupt the run. Returns whether there is one."""
        if self.run is None:
            return False
        with suppress(ProcessLookupError):
            os.kill(self.run, signal.SIGINT)
        return True

    def end(self) -> None:
        self.process.terminate()  # before its pipe is closed, after which it would remove the folders
        try:
            self.process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._commands)
        os.close(self._answers)


@contextmanager
def _output() -> Iterator[IO[bytes]]:
    """A file for what an engine prints."""
    with tempfile.TemporaryFile() as file:
        yield file


@contextmanager
def _our_package() -> Iterator[Path]:
    """A folder to import schedbench from, without what is installed beside it. It also has the temporary files of the
    engine's processes, of which those that were killed leave theirs."""
    with tempfile.TemporaryDirectory(prefix="schedbench-package-") as folder:
        (Path(folder) / _TEMPORARY).mkdir()
        root = Path(folder) / _PACKAGE
        root.mkdir()
        init = import_module(_PACKAGE).__file__
        assert init is not None
        (root / "__init__.py").symlink_to(init)
        for room in _ROOMS:
            (root / room).symlink_to(import_module(f"{_PACKAGE}.{room}").__path__[0])
        yield Path(folder)


class _Stack(NamedTuple):
    """``at`` is the innermost line of the engine, ``text`` the stack as Python shows a traceback."""

    rank: str
    at: str
    text: str

    @classmethod
    def read(cls, file: Path, engine: str) -> _Stack | None:
        """What faulthandler has written, from the outermost line of the ``engine`` on; None where it has none."""
        written = re.findall(r'^  File "(.+)", line (\d+) in (.+)$', file.read_text(), re.MULTILINE)
        inside = [index for index, frame in enumerate(written) if frame[0].startswith(f"{engine}{os.sep}")]
        if not inside:
            return None
        root = f"{os.path.dirname(engine)}{os.sep}"
        frames = [(path, int(line), name, None) for path, line, name in written[inside[-1] :: -1]]
        lines = "".join(traceback.StackSummary.from_list(frames).format()).replace(root, "").rstrip()
        innermost, line, _ = written[inside[0]]
        at = f"{innermost.removeprefix(root)}:{line}"
        return cls(file.name.removeprefix(STACKS), at, "\n".join(lines.splitlines()[-SHOWN_LINES:]))


def _ending(code: int) -> str:
    number = -code if code < 0 else code - SIGNALLED
    with suppress(ValueError):
        return f"was ended by {signal.Signals(number).name}"
    return f"exited with {code}"
