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
from typing import Final, NamedTuple, NoReturn, TypeVar

from ...sched.link import FOREVER, LinkError
from ..run.rank_context import RankContext
from .failures import Answer
from .heartbeat import beating
from .messages import end_copies_of

_ENDING_S: Final = 1.0  # within which a process whose connection is closed ends

L = TypeVar("L")  # a rank's end of its connection
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


class _Beat(NamedTuple):
    """A rank advances."""


class _Ended(NamedTuple):
    """A rank's ``answer``. Where it failed because it ``misses`` another rank, that one has the reason."""

    answer: Answer
    misses: bool = False


@dataclass(slots=True)
class RankProcess:
    """``turn`` is what the rank waits for, None while it runs."""

    name: str
    rank: int
    process: int
    connection: Connection
    turn: Turn | Receipt | None = None
    inbox: list[SentValue] = field(default_factory=list)
    ended: _Ended | None = None

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

    def ended_without_answer(self) -> _Ended:
        """How a process has ended that has closed its connection. It can be waited for once more."""
        how, deadline = "has closed its connection", time.monotonic() + _ENDING_S
        while (found := os.waitid(os.P_PID, self.process, os.WEXITED | os.WNOWAIT | os.WNOHANG)) is None:
            if time.monotonic() > deadline:
                break
            time.sleep(_ENDING_S / 100)
        else:
            exited = found.si_code == os.CLD_EXITED
            name = f"exited with {found.si_status}" if exited else ""
            how = name or f"was ended by {signal.Signals(found.si_status).name}"
        return _Ended({"failed": f"the process of {self.name} {how}", "traceback": ""})

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.process, number)


def run_ranks(
    ranks: Sequence[RankContext],
    run: Callable[[RankContext, L], Answer],
    link: Callable[[int, int, Connection], L],
    failure: Failure,
    beat: Callable[[], None],
) -> list[Answer]:
    """The answers of ``run`` for all ranks, each with the ``link`` that is made of its number, the number of ranks and
    its connection. ``failure``: the answer of a rank that raised; ``beat`` is called while ranks advance. Raises
    RankError where a rank has failed; no process is left running."""

    def linked(rank: int, connection: Connection) -> Answer:
        return run(ranks[rank], link(rank, len(ranks), connection))

    processes: list[RankProcess] = []
    try:
        for rank, context in enumerate(ranks):
            processes.append(_begun(context.name, rank, processes, linked, failure))
        return _answers(processes, beat)
    except BaseException:
        for process in processes:
            process.signal(signal.SIGKILL)
        raise
    finally:
        for process in processes:
            os.waitpid(process.process, 0)
            process.connection.close()


def _begun(
    name: str, rank: int, others: Sequence[RankProcess], run: RunRank, failure: Failure
) -> RankProcess:
    ours, theirs = Pipe()
    process = os.fork()
    if process == 0:
        for connection in (
            ours,
            *(other.connection for other in others),
        ):  # so that the end of a process is seen
            connection.close()
        _run_rank(name, rank, run, failure, theirs)
    theirs.close()
    return RankProcess(name, rank, process, ours)


def _run_rank(name: str, rank: int, run: RunRank, failure: Failure, connection: Connection) -> NoReturn:
    """The process of a rank, which ends with the answer of ``run``, or with that of its failure."""
    process = os.getpid()
    beating(lambda: connection.send(_Beat()))
    with suppress(BrokenPipeError):
        try:
            ended = _Ended(run(rank, connection))
        except BaseException as error:
            answer = failure(error)
            named = {"failed": f"{name}: {answer['failed']}"} if "failed" in answer else {}
            ended = _Ended(answer | named, misses=isinstance(error, LinkError))
        end_copies_of(process)
        connection.send(ended)
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
    ended = [process.ended for process in processes if process.ended is not None]
    for one in ended:
        if one.misses:
            raise RankError(one.answer)
    return [one.answer for one in ended]


def _receive(process: RankProcess, processes: Sequence[RankProcess], beat: Callable[[], None]) -> None:
    """Take the rank's next message. Raises RankError where it has failed."""
    try:
        message = process.connection.recv()
    except (EOFError, OSError):
        message = process.ended_without_answer()
    if isinstance(message, Turn | Receipt):
        process.turn = message
    elif isinstance(message, _Beat):
        beat()
    elif isinstance(message, _Ended):
        process.ended = message
        if "report" not in message.answer and not message.misses:
            raise RankError(message.answer)
    else:
        to, value = message
        processes[to].inbox.append(value)
