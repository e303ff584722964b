"""The pending work of every stream, which is done as late as allowed unless a strategy chooses to do it earlier.

A stream's work is done in the order in which it was enqueued; a wait blocks its stream until the event's stream has
reached the recording. There is no other order.

The numbered strategies are first fixed ones, which find what a random order may miss, then random ones. With two
streams, doing all work as late as possible and favouring either stream found every missing wait of a small overlap loop
deterministically; a missing write-after-read barrier showed in one random seed out of nine.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from ..engine import EventRecording

Work = Callable[[], object]


class DeferredTask(NamedTuple):
    """Something to do on a stream, once the recording ``behind`` was reached, if there is one. ``describe`` returns
    what it is and where it was launched; nothing for what cannot fail."""

    work: Work
    describe: Callable[[], str] = str
    behind: EventRecording | None = None


OrderStrategy = Callable[["DeferredOrder"], int | None]
"""Chooses the stream that goes on although nothing waits for it, None for no stream."""

FAVOURED = ("schedule", "forward", "copy", "staging", "backup", "lengths")
COMMON_STRATEGIES = (
    4  # the first ones, which apply to every run; the others favour streams that not every run has
)
STRATEGIES = ("all work as late as possible", *(f"the {name} stream first" for name in FAVOURED))
_PROBABILITY = 0.3  # of any stream going on after a task


def strategy(seed: int, streams: Mapping[int, str]) -> OrderStrategy:
    """The strategy of that number: first those of ``STRATEGIES``, then random ones. ``streams`` are the names that the
    scheduler gives to streams."""
    if seed == 0:
        return lambda order: None  # noqa: ARG005
    if seed < len(STRATEGIES):
        return partial(_favoured, FAVOURED[seed - 1], streams)
    return partial(_random, random.Random(seed))


def _favoured(name: str, streams: Mapping[int, str], order: DeferredOrder) -> int | None:
    """The stream of that name, whenever it can go on."""
    return next((s for s in order.queues if streams.get(s) == name and order.is_ready(s)), None)


def _random(dice: random.Random, order: DeferredOrder) -> int | None:
    """Any stream, with a fixed probability."""
    if dice.random() >= _PROBABILITY:
        return None
    streams = list(filter(order.is_ready, order.queues))
    return dice.choice(streams) if streams else None


def described(seed: int) -> str:
    return STRATEGIES[seed] if seed < len(STRATEGIES) else f"random order {seed}"


class DeferredOrder:
    """The streams' queues of pending work, and the recordings among it."""

    def __init__(self, strategy: OrderStrategy) -> None:
        self._choose = strategy
        self.queues: dict[int, deque[DeferredTask]] = {}
        self._pending: dict[EventRecording, int] = {}  # recordings that are not reached, with their streams

    @property
    def idle(self) -> bool:
        return not any(self.queues.values())

    # ---- enqueueing ----------------------------------------------------------------------------------------

    def launch(self, stream: int, task: DeferredTask) -> None:
        self.queues.setdefault(stream, deque()).append(task)
        self._run_early()

    def record(self, stream: int, recording: EventRecording) -> None:
        if self.queues.get(stream):
            self._pending[recording] = stream
            self.launch(stream, DeferredTask(partial(self._pending.pop, recording)))

    def wait(self, stream: int, recording: EventRecording) -> None:
        if recording in self._pending and self._pending[recording] != stream:
            self.launch(stream, DeferredTask(lambda: None, behind=recording))

    # ---- the host waits ------------------------------------------------------------------------------------

    def finish(self, stream: int) -> None:
        """Do everything that the stream has been given, and everything that this waits for."""
        queue = self.queues.get(stream)
        while queue:
            self._step(stream)

    def finish_all(self) -> None:
        while not self.idle:
            for stream in list(self.queues):
                self.finish(stream)

    def reach(self, recording: EventRecording) -> None:
        """Do the work of the recording's stream up to the recording."""
        while recording in self._pending:
            self._step(self._pending[recording])

    def _step(self, stream: int) -> None:
        """Do one task of the stream that the next task waits for, or that task; then what the strategy chooses."""
        queue = self.queues[stream]
        behind = queue[0].behind
        if behind is not None and behind in self._pending:
            self._step(self._pending[behind])
            return
        _do(queue.popleft())
        self._run_early()

    # ---- chosen by the strategy ---------------------------------------------------------------------------------

    def _run_early(self) -> None:
        while (stream := self._choose(self)) is not None:
            _do(self.queues[stream].popleft())

    def is_ready(self, stream: int) -> bool:
        """Whether the stream has a next task, and no wait blocks it."""
        queue = self.queues[stream]
        return bool(queue) and queue[0].behind not in self._pending


def _do(task: DeferredTask) -> None:
    try:
        task.work()
    except Exception as error:
        error.add_note(f"in {task.describe()}, done late")
        raise
