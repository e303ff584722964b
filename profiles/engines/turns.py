"""The workers of a pair, or data-parallel ranks: a process for each, forked from that of the run. One runs at a time,
namely the one whose virtual time is lowest.

A worker keeps running until it asks what has arrived by its time, or waits. Workers are ordered by (time, rank), so
that every run of the same workers takes the same course: what a worker is given has been sent by workers that had run
up to its time.

    worker 0   ----turn(5)            |-- 5 --turn(9)
    worker 1   --turn(3)  |-- 3 --turn(7)            |-- 7 -- ...
"""

from __future__ import annotations

import os
import pickle
import signal
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple, NoReturn

import torch

from ...sched.data_parallel.sync import ROUND
from ...sched.link import FOREVER, LinkError, Message
from ..platform.hardware import LinkProfile
from ..run.rank_context import RankContext
from ..vgpu.device import VirtualGpu
from .heartbeat import beating
from .messages import end_copies_of
from .stages import Answer, Failure, RankError, answer_and_exit, end_without_answer, kill

_ALONE: Final = "nothing comes any more: all workers wait"


class SentValue(NamedTuple):
    """A message between workers. ``at``: the instant, ns, at which it has arrived."""

    source: int
    tag: str
    at: int
    body: bytes


class _Turn(NamedTuple):
    """A worker has come to ``now`` and waits until ``until``, or for a message that arrives earlier, ns."""

    now: int
    until: int


class _Beat(NamedTuple):
    """A worker advances."""


@dataclass(slots=True)
class _Worker:
    name: str
    rank: int
    process: int
    connection: Connection
    turn: _Turn = field(default_factory=lambda: _Turn(0, 0))
    inbox: list[SentValue] = field(default_factory=list)
    answer: Answer | None = None

    @property
    def time(self) -> int:
        """When the worker goes on."""
        earliest = min((message.at for message in self.inbox), default=FOREVER)
        return max(self.turn.now, min(self.turn.until, earliest))


RunWorker = Callable[[RankContext, "TurnLink"], Answer]


def run_workers(
    ranks: Sequence[RankContext], run: RunWorker, failure: Failure, beat: Callable[[], None]
) -> list[Answer]:
    """The answers of ``run`` for all ranks, which run in a process each. ``failure``: the answer of a rank that raised;
    ``beat`` is called while workers advance. Raises RankError where a worker has failed; none is left running."""
    workers: list[_Worker] = []
    try:
        for rank in range(len(ranks)):
            workers.append(_started(ranks, rank, workers, run, failure))
        _take_turns(workers, beat)
    except BaseException:
        for worker in workers:
            kill(worker.process)
        raise
    finally:
        for worker in workers:
            os.waitpid(worker.process, 0)
            worker.connection.close()
    return [worker.answer for worker in workers if worker.answer is not None]


def _started(
    ranks: Sequence[RankContext], rank: int, others: Sequence[_Worker], run: RunWorker, failure: Failure
) -> _Worker:
    ours, theirs = Pipe()
    process = os.fork()
    if process == 0:
        ours.close()
        for other in others:  # so that the end of a process is seen
            other.connection.close()
        _run_worker(ranks, rank, theirs, run, failure)
    theirs.close()
    return _Worker(_name(ranks[rank], rank), rank, process, ours)


def _name(context: RankContext, rank: int) -> str:
    return f"rank {rank}" if context.place is None else context.place.name


def _run_worker(
    ranks: Sequence[RankContext], rank: int, connection: Connection, run: RunWorker, failure: Failure
) -> NoReturn:
    """The process of a worker."""
    beating(lambda: connection.send(_Beat()))
    link = TurnLink(rank, len(ranks), connection)
    answer_and_exit(_name(ranks[rank], rank), lambda: run(ranks[rank], link), failure, connection)


def _take_turns(workers: Sequence[_Worker], beat: Callable[[], None]) -> None:
    """Let the worker with the lowest time run until all have answered. Ctrl-C is for each of them."""
    started = interrupted = False
    while running := [worker for worker in workers if worker.answer is None]:
        chosen = min(running, key=lambda worker: (worker.time, worker.rank))
        try:
            if started:
                _grant(chosen)
            for worker in [chosen] if started else running:  # at first each runs up to its first turn
                _run_until_turn(worker, workers, beat)
            started = True
        except KeyboardInterrupt:
            if interrupted:
                raise
            started = interrupted = True
            for worker in running:
                with suppress(ProcessLookupError):
                    os.kill(worker.process, signal.SIGINT)
            for worker in running:
                _finish(worker, workers)


def _finish(worker: _Worker, workers: Sequence[_Worker]) -> None:
    """Let an interrupted worker come to its answer, whatever it asks for."""
    while worker.answer is None:
        _run_until_turn(worker, workers, lambda: None)
        if worker.answer is None:
            worker.connection.send((FOREVER, []))


def _grant(worker: _Worker) -> None:
    at = worker.time
    arrived = sorted(
        (message for message in worker.inbox if message.at <= at), key=lambda message: message.at
    )
    worker.inbox = [message for message in worker.inbox if message.at > at]
    with suppress(BrokenPipeError):  # of a process that has ended, which is found next
        worker.connection.send((at, arrived))


def _run_until_turn(worker: _Worker, workers: Sequence[_Worker], beat: Callable[[], None]) -> None:
    """Receive what the worker says until it waits for its turn or has its answer. Raises RankError."""
    while True:
        try:
            said = worker.connection.recv()
        except (EOFError, OSError):
            raise RankError(end_without_answer(worker.name, worker.process)) from None
        if isinstance(said, _Turn):
            worker.turn = said
            return
        if isinstance(said, _Beat):
            beat()
        elif isinstance(said, dict):
            worker.answer = said
            if "document" not in said:
                raise RankError(said)
            return
        else:
            to, message = said
            workers[to].inbox.append(message)


class TurnLink:
    """A worker's end of its connections to the others, with the times of a link of the hardware. Messages of one
    sender with one tag arrive in the order in which they were sent."""

    def __init__(self, rank: int, size: int, connection: Connection) -> None:
        self.rank, self.size = rank, size
        self._connection = connection
        self._process = os.getpid()
        self._arrived: defaultdict[tuple[int, str], deque[SentValue]] = defaultdict(deque)
        self._gpu: VirtualGpu
        self.profile: LinkProfile

    def open(self, gpu: VirtualGpu, profile: LinkProfile) -> None:
        """Set the device whose host this is, and the link's times."""
        self._gpu, self.profile = gpu, profile

    def post(self, to: int, tag: str, value: Any, at: int) -> None:
        """Send a value that arrives at ``at``, ns, and takes no time of the host."""
        end_copies_of(self._process)
        self._connection.send((to, SentValue(self.rank, tag, at, pickle.dumps(value))))

    def send(self, to: int, tag: str, value: Any, tensors: Sequence[torch.Tensor] = ()) -> None:
        assert not tensors, "tensors are posted with the time at which they arrive"
        runtime, profile = self._gpu.runtime, self.profile
        if tag == ROUND:  # of the run, not of the engine
            self.post(to, tag, value, runtime.now)
            return
        runtime.now += round(profile.call.value)
        self.post(to, tag, value, runtime.now + round(profile.host_latency.value))

    def receive(self, source: int, tag: str) -> Message:
        """Raises LinkError where nothing can come."""
        while not self._arrived[source, tag]:
            self.sleep_until(FOREVER)
        message = self._arrived[source, tag].popleft()
        return Message(source, pickle.loads(message.body), ())

    def poll(self, tag: str) -> Message | None:
        """The next message that has arrived by the last turn."""
        for (source, found), messages in self._arrived.items():
            if found == tag and messages:
                return Message(source, pickle.loads(messages.popleft().body), ())
        return None

    def take_turn(self) -> None:
        """Receive what has arrived by now."""
        self.sleep_until(self._gpu.runtime.now)

    def sleep_until(self, until: int) -> None:
        """Advance the host's clock to ``until``, ns, or to the next arrival. Raises LinkError where that is never."""
        end_copies_of(self._process)
        runtime = self._gpu.runtime
        self._connection.send(_Turn(runtime.now, max(until, runtime.now)))
        at, arrived = self._connection.recv()
        if at >= FOREVER:
            raise LinkError(_ALONE)
        runtime.now = max(runtime.now, at)
        for message in arrived:
            self._arrived[message.source, message.tag].append(message)
