"""Failures of an engine in words, with the engine's own frames, and objects as text: what its processes answer.

Imports the standard library alone.
"""

from __future__ import annotations

import base64
import os
import pickle
import re
import traceback
from bdb import BdbQuit
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeGuard

SHOWN_LINES: Final = 40  # of an engine's traceback, and of what it printed, in a message
STACKS: Final = (
    "stack-"  # files in the folder of temporary files: the stacks of processes, each with its rank
)
_OURS: Final = str(Path(__file__).parents[2])
_DEVICE: Final = tuple(os.path.join(_OURS, "profiles", part, "") for part in ("vgpu", "programs"))
_NO_INPUT: Final = (BdbQuit, EOFError)
_OF_TORCH: Final = (AttributeError, IndexError, MemoryError, RuntimeError, TypeError, ValueError)

Answer = dict[str, Any]


class EngineFaultError(RuntimeError):
    """What schedbench has found in an engine's run, in a sentence that needs no traceback."""


def packed(value: object) -> str:
    """An object as text, for processes that have the same schedbench."""
    return base64.b64encode(pickle.dumps(value)).decode()


def unpacked(text: str) -> Any:
    return pickle.loads(base64.b64decode(text))


def failure(error: BaseException, engine: str) -> Answer:
    """The answer for a run or an import that raised. ``engine``: the folder of the engine whose lines are reported."""
    if isinstance(error, KeyboardInterrupt):
        return {"interrupted": True}
    if (of_rank := getattr(error, "of_rank", None)) is not None:
        return dict(of_rank)
    if isinstance(error, EngineFaultError):
        return {"failed": str(error), "traceback": ""}
    if _is_ours(error):
        return {"raised": packed(error)}
    name = f"exited with {error.code}" if isinstance(error, SystemExit) else _in_words(error)
    shown = traceback.TracebackException(type(error), error, error.__traceback__)
    placed = _place(name, error, shown, engine)
    lines = _relative("".join(shown.format()), engine, _OURS).splitlines()
    return {"failed": _relative(placed, engine, _OURS), "traceback": "\n".join(lines[-SHOWN_LINES:])}


def _place(name: str, error: BaseException, shown: traceback.TracebackException, engine: str) -> str:
    """The error with the engine's line. An error of schedbench's code that the engine has called says so, unless it is
    an answer of the virtual GPU: what that raises, or what torch raises in an operation or a kernel. Of an operation of
    the stub model, which the engine's data can have broken, the stub's line is named, too. Of schedbench's frames,
    ``shown`` keeps those of an error that is its own, and the stub's line."""
    frames = list(shown.stack)
    inside = [index for index, frame in enumerate(frames) if _is_in(frame.filename, engine)]
    if not inside and not _is_syntax_of(error, engine):
        return name
    ours = [frame for frame in frames[inside[-1] :] if _is_in(frame.filename, _OURS)] if inside else []
    stub = [frame for frame in ours if not frame.filename.startswith(_DEVICE)]
    answered = isinstance(error, _OF_TORCH) or (bool(ours) and str(ours[-1].line).startswith("raise "))
    own = bool(ours) and not (len(stub) < len(ours) and answered)
    chain = [shown]
    for each in chain:
        each.stack[:] = engine_frames(each.stack, engine, hidden=None if own else _OURS)
        chain += filter(None, (each.__cause__, each.__context__, *(each.exceptions or ())))
    if _is_syntax_of(error, engine):
        return f"{name} (at {error.filename}:{error.lineno})"
    at = _line(frames[inside[-1]])
    if own:
        return f"an error in schedbench's own code, not the engine's: {name} (at {_line(ours[-1])}, called at {at})"
    shown.stack += stub[-1:]
    by_stub = "; raised in schedbench's stub, with the engine's data, at "
    return f"{name} (at {at}{''.join(by_stub + _line(frame) for frame in stub[-1:])})"


def _line(frame: traceback.FrameSummary) -> str:
    return f"{frame.filename}:{frame.lineno}"


def _relative(text: str, engine: str, ours: str) -> str:
    return text.replace(f"{os.path.dirname(engine)}{os.sep}", "").replace(f"{ours}{os.sep}", "").rstrip()


def engine_frames(
    frames: Iterable[traceback.FrameSummary], engine: str, hidden: str | None
) -> list[traceback.FrameSummary]:
    """The frames of a stack from the engine's outermost one on, without those of files in the folder ``hidden``, and of
    what these call."""
    kept, left_out = [], True
    for frame in frames:
        if _is_in(frame.filename, engine):
            left_out = False
        elif hidden is not None and _is_in(frame.filename, hidden):
            left_out = True
        if not left_out:
            kept.append(frame)
    return kept


class Stack(NamedTuple):
    """The stack of a process that did not advance. ``at`` is the innermost line of the engine, ``text`` the stack as
    Python shows a traceback."""

    rank: str
    at: str
    text: str

    @classmethod
    def read(cls, file: Path, engine: str, ours: str) -> Stack | None:
        """What faulthandler has written, from the outermost line of the ``engine`` on; None where it has none."""
        written = re.findall(r'^  File "(.+)", line (\d+) in (.+)$', file.read_text(), re.MULTILINE)
        frames = [traceback.FrameSummary(path, int(line), name) for path, line, name in reversed(written)]
        shown = engine_frames(frames, engine, hidden=ours)
        if not shown:
            return None
        innermost = [frame for frame in shown if _is_in(frame.filename, engine)][-1]
        lines = _relative(
            "".join(traceback.StackSummary.from_list(shown).format()), engine, ours
        ).splitlines()
        at = _relative(_line(innermost), engine, ours)
        return cls(file.name.removeprefix(STACKS), at, "\n".join(lines[-SHOWN_LINES:]))


def _in_words(error: BaseException) -> str:
    """With its notes, such as those of an adversary. A debugger and ``input`` read the standard input."""
    notes = (
        *getattr(error, "__notes__", ()),
        "an engine has no standard input" * isinstance(error, _NO_INPUT),
    )
    text = "; ".join(filter(None, (" ".join(str(error).split()), *notes)))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _is_ours(error: BaseException) -> bool:
    """Whether the error is one of schedbench's own sentences, and can be handed on. An error that schedbench has found
    in the engine is the engine's."""
    if getattr(error, "of_program", False) or not type(error).__module__.startswith(
        f"{__package__.split('.')[0]}."
    ):
        return False
    with suppress(Exception):
        return str(unpacked(packed(error))) == str(error)
    return False


def _is_syntax_of(error: BaseException, engine: str) -> TypeGuard[SyntaxError]:
    """Whether a file of the engine cannot be parsed, which the error itself shows."""
    return isinstance(error, SyntaxError) and _is_in(str(error.filename), engine)


def _is_in(file: str, folder: str) -> bool:
    return file.startswith(f"{folder}{os.sep}")
