"""Deaths by script, of one rank: what listens for the moment, and what then happens. The scheduler knows nothing."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Literal, NamedTuple

import torch

from ...scenarios.failures import rank_names, role_of
from ...scenarios.schema import Scenario
from ...sched.disagg.messages import ENDED, HANDSHAKE, KV, REQUEST
from ...sched.link import Link, Message
from ...sched.loop.pipelined import PROXY
from ...sched.observe import Observer
from ...sched.pipeline.source import REQUESTS


class DiedError(Exception):
    """This rank has been killed, by script."""


class _Moment(NamedTuple):
    """A range that opens, a message that is about to be sent, or one that has been taken."""

    kind: Literal["range", "send", "take"]
    name: str


_MOMENTS: Final[Mapping[str, Mapping[str, Sequence[_Moment]]]] = {
    "stage": {
        "proxies": (_Moment("send", PROXY),),
        "tokens": (_Moment("range", "copy"),),
    },
    "rank": {},
    "replica": {"requests": (_Moment("take", REQUEST),), "ended": (_Moment("send", ENDED),)},
    "prefill": {
        "requests": (_Moment("take", REQUEST),),
        "bootstrap": (_Moment("take", HANDSHAKE),),
        "transfer": (_Moment("send", KV),),
    },
    "decode": {
        "requests": (_Moment("take", REQUEST),),
        "bootstrap": (_Moment("send", HANDSHAKE),),
        "transfer": (_Moment("take", KV),),
        "ended": (_Moment("send", ENDED),),
    },
    "router": {"requests": (_Moment("send", REQUEST),), "ended": (_Moment("take", ENDED),)},
}
_FORWARDS: Final = ("model", "draft")  # ranges that a step on the device begins with


class FaultInjector(Observer):
    """``kill`` is told how; it may come back, and DiedError is raised then. Nothing happens, and nothing is counted,
    before it is armed."""

    def __init__(self, scenario: Scenario, rank: int, kill: Callable[[str], None]) -> None:
        self.came: list[int] = []  # places in the script
        self._name = rank_names(scenario)[rank]
        self._kill = kill
        self.armed = False
        self._schedule = {
            place: (failure.dies, _moments(self._name, failure.dies.phase))
            for place, failure in enumerate(scenario.faults)
            if failure.dies is not None and failure.rank == self._name
        }
        self._met: Counter[int] = Counter()

    def arm(self) -> None:
        """The measured workload begins."""
        self.armed = True

    def range(self, name: str, step: int, size: int) -> AbstractContextManager[object]:
        self.meet("range", name)
        return super().range(name, step, size)

    def around(self, link: Link) -> Link:
        """The same link, on which the rank may die."""
        return _LastLink(link, self)

    def meet(self, kind: Literal["range", "send", "take"], name: str) -> None:
        """Raises DiedError when it is time."""
        for place, (dies, moments) in self._schedule.items() if self.armed else ():
            if (kind, name) not in moments:
                continue
            self._met[place] += 1
            if self._met[place] == dies.nth:
                self.came.append(place)
                how = f"killed by script in {dies.phase} {dies.nth}"
                self._kill(how)
                raise DiedError(f"{self._name} was {how}")


def inject_process_deaths(scenario: Scenario, link: Link) -> tuple[Link, FaultInjector | None]:
    """Of a process: its link, and what is to happen to it; nothing without a script."""
    if not scenario.faults:
        return link, None
    fault_injector = FaultInjector(scenario, link.rank, lambda how: os.kill(os.getpid(), signal.SIGKILL))  # noqa: ARG005
    return fault_injector.around(link), fault_injector


def _moments(rank: str, phase: str) -> Sequence[_Moment]:
    if phase == "forward":
        return [_Moment("range", name) for name in _FORWARDS]
    if (role_of(rank), phase) == ("stage", "requests"):  # the first stage has nobody to hear of them from
        return [_Moment("send" if rank == "stage 0" else "take", REQUESTS)]
    return _MOMENTS[role_of(rank)].get(phase) or [_Moment("range", phase)]


class _LastLink:
    def __init__(self, link: Link, fault_injector: FaultInjector) -> None:
        self.rank, self.size = link.rank, link.size
        self._link = link
        self._perils = fault_injector

    def send(self, to: int, tag: str, value: Any, tensors: Sequence[torch.Tensor] = ()) -> None:
        self._perils.meet("send", tag)
        self._link.send(to, tag, value, tensors)

    def flush(self, tag: str) -> None:
        self._link.flush(tag)

    def receive(self, source: int, tag: str) -> Message:
        message = self._link.receive(source, tag)
        self._perils.meet("take", tag)
        return message

    def all_to_all(self, tag: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self._link.all_to_all(tag, tensors)

    def poll(self, tag: str) -> Message | None:
        message = self._link.poll(tag)
        if message is not None:
            self._perils.meet("take", tag)
        return message

    def wait(self, tags: Sequence[str], until: int | None) -> None:
        self._link.wait(tags, until)

    def gone(self) -> Mapping[int, str]:
        return self._link.gone()
