"""The started process of an engine: its interpreter, its pipes and its output."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Final

from .failures import SHOWN_LINES, Answer
from .names import EngineError

GRACE_S: Final = 10.0  # for a run that was interrupted to say what it has, and for a process to end
TEMPORARY: Final = "temporary"  # the folder of temporary files, in that of ``our_package``
PACKAGE: Final = __name__.partition(".")[0]
_ROOMS: Final = ("profiles", "scenarios", "sched")
_SERVER: Final = f"{__package__}.server"
_LOOK_S: Final = 1.0  # between two looks at whether the process is there


@contextmanager
def our_package() -> Iterator[Path]:
    """A folder to import schedbench from, without what is installed beside it. It also has the temporary files of the
    engine's processes, of which those that were killed leave theirs."""
    with tempfile.TemporaryDirectory(prefix="schedbench-package-") as folder:
        (Path(folder) / TEMPORARY).mkdir()
        root = Path(folder) / PACKAGE
        root.mkdir()
        init = import_module(PACKAGE).__file__
        assert init is not None
        (root / "__init__.py").symlink_to(init)
        for room in _ROOMS:
            (root / room).symlink_to(import_module(f"{PACKAGE}.{room}").__path__[0])
        yield Path(folder)


class EngineOutput:
    """What the processes of an engine print, in a file without a name."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self._command = self._run = 0  # positions

    def begin_command(self) -> None:
        self._command = self._size()

    def begin_run(self) -> None:
        self._run = self._size()

    def printed(self) -> str:
        """What was printed since the last run began."""
        return self._from(self._run)

    def last(self) -> list[str]:
        """The last lines since the last command began, below a title; empty where there are none."""
        lines = self._from(self._command).splitlines()
        shown = lines[-SHOWN_LINES:]
        part = f" (the last {len(shown)} of {len(lines)} lines)" if len(shown) < len(lines) else ""
        return [f"What it printed{part}:", *shown] if lines else []

    def _size(self) -> int:
        return os.fstat(self.file.fileno()).st_size

    def _from(self, position: int) -> str:
        text = os.pread(self.file.fileno(), self._size() - position, position)
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
                    "TMPDIR": str(ours / TEMPORARY),
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
        if self.run is not None:
            with suppress(ProcessLookupError):
                os.kill(self.run, signal.SIGINT)
        return self.run is not None

    def end(self) -> None:
        self.process.terminate()  # before its pipe is closed, after which it would remove the folders
        try:
            self.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._commands)
        os.close(self._answers)


def ending(code: int) -> str:
    with suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"exited with {code}"
