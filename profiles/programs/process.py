"""The process in which a program is watched, and the way to it from the command line.

parent: schedbench watch              child: python -m schedbench.profiles.programs.process
  request as JSON -- an argument -->    writes an empty line, runs the script; its stdout goes to stderr
  result document <-- a pipe's end --   writes the document, or the error
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import Final

from ..captures import maps
from ..platform.hardware import load
from ..platform.machine import MachineError
from ..record.result import Result
from . import triton_kernels
from .watch import ProgramError, WatchRequest, watched

FAILED: Final = 4
_MODULE: Final = "schedbench.profiles.programs.process"


def run_watched(python: str, request: WatchRequest) -> Result:
    """Run the request in a process of the interpreter ``python``.

    Raises ProgramError if the program failed, MachineError if that interpreter has no schedbench, HardwareError and
    MapError.
    """
    load(request.hardware)
    if request.map is not None:
        maps.load(request.map)
    reader, writer = os.pipe()
    command = [python, "-m", _MODULE, str(writer), json.dumps(request._asdict())]
    with os.fdopen(reader, encoding="utf-8") as answers:
        try:
            child = subprocess.Popen(
                command,
                pass_fds=[writer],
                stdout=sys.stderr.fileno(),
                env={**os.environ, triton_kernels.VARIABLE: "1"},
            )
        except OSError as error:
            raise MachineError(f"{python} cannot be started: {error.strerror}") from None
        finally:
            os.close(writer)
        try:
            text = answers.read()
            code = child.wait()
        finally:
            child.kill()
            child.wait()
    return _answer(text, code, python, request)


def _answer(text: str, code: int, python: str, request: WatchRequest) -> Result:
    if text.strip():
        document = json.loads(text)
        if "error" in document:
            raise ProgramError(document["error"])
        return Result.from_document(document, name=request.script)
    if not text:
        raise MachineError(f"{python} has no schedbench: install it there, or write python for this one")
    ended = f"was ended by signal {-code}" if code < 0 else f"exited with {code}"
    raise ProgramError(f"{request.script}: its process {ended} before it was done")


def main(arguments: Sequence[str]) -> int:
    """The child's part: ``arguments`` are the number of the pipe's end and the request."""
    number, text = arguments
    fields = json.loads(text)
    lists = {name: tuple(fields[name]) for name in ("arguments", "hollow")}
    request = WatchRequest(**{**fields, **lists})
    _end_with_reader(int(number))
    with os.fdopen(int(number), "w", encoding="utf-8") as answers:
        print(file=answers, flush=True)
        try:
            answers.write(watched(request).to_json())
        except Exception as error:
            traceback.print_exception(type(error), error, _from_script(error.__traceback__, request.script))
            reason = str(error) if isinstance(error, ProgramError) else f"{type(error).__name__}: {error}"
            answers.write(json.dumps({"error": f"{request.script}: {reason}"}))
            return FAILED
    return 0


def _end_with_reader(number: int) -> None:
    """Make this process exit as soon as the reader of that pipe has ended for any reason."""
    ends = select.poll()
    ends.register(number, 0)  # the end of the reader is always reported

    def wait() -> None:
        ends.poll()
        os._exit(1)

    threading.Thread(target=wait, name="end_with_reader", daemon=True).start()


def _from_script(frames: TracebackType | None, script: str) -> TracebackType | None:
    """The traceback from the script's own frame on, as Python itself would print it."""
    while frames is not None and frames.tb_frame.f_code.co_filename != script:
        frames = frames.tb_next
    return frames


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
