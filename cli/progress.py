"""Progress of a run that takes a while, on stderr: a bar in a terminal, else a line every ten seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from ..sched.observe import Clock, Observer, StepInfo
from .console import LINE_S

if TYPE_CHECKING:
    from ..sched.request import Request

PATIENCE_S: Final = 1.0  # shorter runs show no progress
REFRESH_S: Final = 0.1


class RunProgress(Observer):
    """An observer that draws the requests done, the time of the run, steps per second and the time left.

    ``now`` is wall time in seconds; ``clock`` is that of the run. Between refreshes a step costs one comparison.
    """

    def __init__(
        self,
        console: Console,
        *,
        total: int | None,
        clock: Clock,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._total = total
        self._clock = clock
        self._now = now
        self._began = now()
        self._due = self._began + (PATIENCE_S if console.is_terminal else LINE_S)
        self._steps = 0
        self._done = 0
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def settled(self, info: StepInfo) -> None:  # noqa: ARG002
        self._steps += 1
        now = self._now()
        if now < self._due:
            return
        if self._console.is_terminal:
            self._due = now + REFRESH_S
            self._draw(now)
        else:
            self._due = now + LINE_S
            self._console.print(
                f"{self._done} of {self._total} requests, {self._clock.now() / 1e9:.2f} s of the run"
            )

    def ended(self, request: Request) -> None:  # noqa: ARG002
        self._done += 1

    def _draw(self, now: float) -> None:
        if self._bar is None:
            self._bar = self._made()
            self._task = self._bar.add_task("run", total=self._total, run="", rate="")
            self._bar.start()  # may be interrupted, and is then stopped as well
        self._bar.update(
            self._task,
            completed=self._done,
            run=f"{self._clock.now() / 1e9:.2f} s",
            rate=f"{self._steps / (now - self._began):,.0f} steps/s",
        )
        self._bar.refresh()

    def _made(self) -> Progress:
        """A bar that does not redirect stdout and stderr, which the result goes to."""
        return Progress(
            MofNCompleteColumn(),
            TextColumn("requests"),
            BarColumn(bar_width=None),
            TextColumn("at {task.fields[run]}"),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=self._console,
            auto_refresh=False,
            transient=True,
            expand=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
