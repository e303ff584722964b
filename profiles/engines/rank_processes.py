"""A process for each rank of a run, forked from that of the run, which collects their answers.

Ranks run at the same time, except those that wait for their turn in virtual time: once all of them wait, the one goes
on whose time is lowest. Such ranks are ordered by (time, rank), so that every run of the same ranks takes the same
course: what a rank is given has been sent by ranks that had run up to its time.

    rank 0   ----turn(5)            |-- 5 --turn(9)
    rank 1   --turn(3)  |-- 3 --turn(7)            |-- 7 -- ...

A rank that waits for a message of a certain rank, whatever its time, is given what there is at once.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Final, NamedTuple, NoReturn

from ...sched.link import FOREVER, LinkError
from .failures import Answer
from .messages import end_copies_of

BEAT: Final = None  # a rank advances
_ENDING_S: Final = 1.0  # within which a process whose connection is closed ends

Failure = Callable[[BaseException], Answer]
RunRank = Callable[[int, Connection], Answer]


class RankError(RuntimeError):
    """A rank has ended without a report. ``of_rank`` is its answer."""

    def __init__(self, answer: Answer) -> None:
        super().__init__("a rank has failed")
        self.of_rank = answer


class SentValue(NamedTuple):
    """A message between ranks. ``at``: the instant, ns, at which it has arrived."""

    source: int
    tag: str
    at: int
    body: bytes


class Turn(NamedTuple):
    """A rank has come to ``now`` and waits until ``until``, or for a message that arrives earlier, ns."""

    now: int
    until: int


class Receipt(NamedTuple):
    """A rank waits for the next message, whose time means nothing, unless the rank ``source`` has ended."""

    source: int


@dataclass(slots=True)
class RankProcess:
    """``turn`` is what the rank waits for, None while it runs. ``ended`` is its answer, with ``misses`` where it failed
    because it misses another rank, which has the reason. ``exit_code`` is that of a process that was waited for."""

    name: str
    rank: int
    process: int
    connection: Connection
    turn: Turn | Receipt | None = None
    inbox: list[SentValue] = field(default_factory=list)
    ended: Answer | None = None
    exit_code: int | None = None

    @property
    def time(self) -> int:
        """When a rank that waits for its turn goes on."""
        assert isinstance(self.turn, Turn)
        earliest = min((message.at for message in self.inbox), default=FOREVER)
        return max(self.turn.now, min(self.turn.until, earliest))

    def grant(self, at: int) -> None:
        """Let the rank go on at that time, with what has arrived by then."""
        arrived = [message for message in self.inbox if message.at <= at]
        arrived.sort(key=lambda message: (message.at, message.source))
        self.inbox = [message for message in self.inbox if message.at > at]
        self.turn = None
        with suppress(BrokenPipeError):  # of a process that has ended, which is found next
            self.connection.send((at, arrived))

    def ended_without_answer(self) -> Answer:
        """How a process has ended that has closed its connection."""
        deadline = time.monotonic() + _ENDING_S
        while (code := self.wait(os.WNOHANG)) is None and time.monotonic() < deadline:
            time.sleep(_ENDING_S / 100)
        if code is None:
            how = "has closed its connection"
        else:
            how = f"exited with {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"
        return {"failed": f"the process of {self.name} {how}", "traceback": ""}

    def wait(self, options: int = 0) -> int | None:
        """The exit code of the process, None while it runs. ``options`` are those of ``os.waitpid``."""
        if self.exit_code is None:
            ended, status = os.waitpid(self.process, options)
            self.exit_code = os.waitstatus_to_exitcode(status) if ended else None
        return self.exit_code

    def signal(self, number: int) -> None:
        if self.exit_code is None:  # else its number may be that of another process
            with suppress(ProcessLookupError):
                os.kill(self.process, number)


def run_ranks(names: Sequence[str], run: RunRank, failure: Failure, beat: Callable[[], None]) -> list[Answer]:
    """The answers of ``run`` for all ranks, which have these names: it gets a rank's number and its connection, by
    which it sends BEAT while it advances. ``failure``: the answer of a rank that raised; ``beat`` is called while ranks
    advance. Raises RankError where a rank has failed; no process is left running."""
    processes: list[RankProcess] = []
    try:
        for rank, name in enumerate(names):
            ours, theirs = Pipe()
            process = os.fork()
            if process == 0:
                for other in (ours, *(other.connection for other in processes)):
                    other.close()  # so that the end of a process is seen
                _run_rank(name, rank, run, failure, theirs)
            theirs.close()
            processes.append(RankProcess(name, rank, process, ours))
        return _answers(processes, beat)
    except BaseException:
        for started in processes:
            started.signal(signal.SIGKILL)
        raise
    finally:
        for started in processes:
            started.wait()
            started.connection.close()


def _run_rank(name: str, rank: int, run: RunRank, failure: Failure, connection: Connection) -> NoReturn:
    """The process of a rank, which ends with the answer of ``run``, or with that of its failure."""
    process = os.getpid()
    with suppress(BrokenPipeError):
        try:
            answer = run(rank, connection)
        except BaseException as error:
            answer = failure(error)
            if "failed" in answer:
                answer["failed"] = f"{name}: {answer['failed']}"
            if isinstance(error, LinkError):
                answer["misses"] = True
        end_copies_of(process)
        connection.send(answer)
    os._exit(0)


def _answers(processes: Sequence[RankProcess], beat: Callable[[], None]) -> list[Answer]:
    """Let the ranks run until all have answered. Ctrl-C is for each of them: all come to their answers, whatever they
    wait for."""
    interrupted = False
    while running := [process for process in processes if process.ended is None]:
        try:
            for process in running:
                if isinstance(process.turn, Receipt) and (
                    process.inbox or processes[process.turn.source].ended
                ):
                    process.grant(0 if process.inbox else FOREVER)
            if all(isinstance(process.turn, Turn) for process in running):
                chosen = min(running, key=lambda process: (process.time, process.rank))
                chosen.grant(FOREVER if interrupted else chosen.time)
            ready = wait([process.connection for process in running])
            _receive(next(process for process in running if process.connection in ready), processes, beat)
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted = True
            for process in running:
                process.turn = None
                process.signal(signal.SIGINT)
    answers = [process.ended for process in processes if process.ended is not None]
    for answer in answers:
        if answer.pop("misses", False):
            raise RankError(answer)
    return answers


def _receive(process: RankProcess, processes: Sequence[RankProcess], beat: Callable[[], None]) -> None:
    """Take the rank's next message. Raises RankError where it has failed."""
    try:
        message = process.connection.recv()
    except (EOFError, OSError):
        message = process.ended_without_answer()
    if isinstance(message, Turn | Receipt):
        process.turn = message
    elif message is BEAT:
        beat()
    elif isinstance(message, dict):
        process.ended = message
        if "report" not in message and "misses" not in message:
            raise RankError(message)
    else:
        to, value = message
        processes[to].inbox.append(value)
