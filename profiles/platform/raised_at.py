"""The lines of the scheduler and of the user's files in a traceback. Imports the standard library alone, since the
scheduler's modules may be what fails."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from traceback import FrameSummary, extract_tb
from typing import Final

USER_MODULES: Final = "schedbench_user_"  # how the names begin that user_files.py gives to modules
_ROOT: Final = Path(__file__).resolve().parents[2]  # of the packages


def own_frames(error: BaseException) -> Iterator[FrameSummary | None]:
    """The frames of schedbench's code and of the user's files, the innermost last, or a file of theirs that is no
    Python. The scheduler's have their file's name in the package, the user's its path from the working directory; None
    stands for each of the tool's."""
    frames = list(extract_tb(error.__traceback__))
    if isinstance(error, SyntaxError) and error.filename:
        frames.append(FrameSummary(error.filename, error.lineno, ""))
    users = {module.__file__ for name, module in sys.modules.items() if name.startswith(USER_MODULES)}
    for frame in frames:
        path = Path(frame.filename).resolve()
        if str(path) in users:
            yield _named(os.path.relpath(path), frame)
        elif path.is_relative_to(_ROOT) and "site-packages" not in path.relative_to(_ROOT).parts:
            own = path.relative_to(_ROOT)
            yield _named(own.as_posix(), frame) if own.parts[0] == "sched" else None


def _named(file: str, frame: FrameSummary) -> FrameSummary:
    return FrameSummary(file, frame.lineno, frame.name, line=frame.line)
