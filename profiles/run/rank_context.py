"""What one rank of a run has: its link to the other ranks, its part of the work, and its death where the scenario
scripts one, at the n-th range, send or receive of a phase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Literal, NamedTuple

import torch

from ...scenarios.failures import role_of, sends
from ...scenarios.schema import Scenario
from ...sched.data_parallel.sync import PartitionedSource, RankShare
from ...sched.disagg.kv import FakeLink
from ...sched.disagg.layout import ENDED, HANDSHAKE, KV, REQUEST, RankLayout
from ...sched.disagg.router import RoutedSource, WorkerSource
from ...sched.link import Link, Message
from ...sched.loop.pipelined import PROXY
from ...sched.model.config import ModelConfig
from ...sched.model.runner import GraphInput
from ...sched.model.tags import TagPool
from ...sched.observe import Clock, Observer
from ...sched.pipeline import REQUESTS, Stage, StageSource
from ...sched.request import RequestSource


class DiedError(Exception):
    """This rank was killed, as the scenario scripts it."""


_Kind = Literal["range", "send", "receive"]
_Trigger = tuple[_Kind, str]
"""A range that opens, a message that is about to be sent, or a message that has been received."""

_FORWARDS: Final = ("model", "draft")  # ranges that a step on the device begins with
_MESSAGES: Final = {"requests": REQUEST, "bootstrap": HANDSHAKE, "transfer": KV, "ended": ENDED}


class FaultInjector(Observer):
    """Calls ``kill`` with the reason, and raises DiedError if that returns. It counts triggers once it is ``armed``,
    when the measured workload begins."""

    def __init__(self, scenario: Scenario, name: str, kill: Callable[[str], None]) -> None:
        self.armed = False
        self.triggered: list[int] = []  # indices into the script
        self._name = name
        self._kill = kill
        self._schedule = {
            index: (failure.dies, _triggers(self._name, failure.dies.phase))
            for index, failure in enumerate(scenario.faults)
            if failure.dies is not None and failure.rank == self._name
        }
        self._counts: Counter[int] = Counter()

    def range(self, name: str, step: int, size: int) -> AbstractContextManager[object]:
        self.check("range", name)
        return super().range(name, step, size)

    def check(self, kind: _Kind, name: str) -> None:
        """Count a trigger. Raises DiedError when the script kills the rank here."""
        for index, (dies, triggers) in self._schedule.items() if self.armed else ():
            if (kind, name) not in triggers:
                continue
            self._counts[index] += 1
            if self._counts[index] == dies.nth:
                self.triggered.append(index)
                how = f"killed by script in {dies.phase} {dies.nth}"
                self._kill(how)
                raise DiedError(f"{self._name} was {how}")


def _triggers(rank: str, phase: str) -> Sequence[_Trigger]:
    """With what a phase of that rank begins: a range of that name, unless it is a message."""
    role = role_of(rank)
    if phase == "forward":
        return [("range", name) for name in _FORWARDS]
    if role == "stage":
        # Requests enter at the first stage: it only sends them.
        requests: _Trigger = ("send" if rank == "stage 0" else "receive", REQUESTS)
        named: dict[str, _Trigger] = {
            "requests": requests,
            "proxies": ("send", PROXY),
            "tokens": ("range", "copy"),
        }
        return [named.get(phase, ("range", phase))]
    if phase in _MESSAGES:
        return [("send" if sends(role, _MESSAGES[phase]) else "receive", _MESSAGES[phase])]
    return [("range", phase)]


class _FaultInjectingLink:
    """The same link, whose sends and receipts are triggers."""

    def __init__(self, link: Link, injector: FaultInjector) -> None:
        self.rank, self.size = link.rank, link.size
        self.flush, self.all_to_all, self.wait, self.gone = link.flush, link.all_to_all, link.wait, link.gone
        self._link = link
        self._injector = injector

    def send(self, to: int, tag: str, value: Any, tensors: Sequence[torch.Tensor] = ()) -> None:
        self._injector.check("send", tag)
        self._link.send(to, tag, value, tensors)

    def receive(self, source: int, tag: str) -> Message:
        message = self._link.receive(source, tag)
        self._injector.check("receive", tag)
        return message

    def poll(self, tag: str) -> Message | None:
        message = self._link.poll(tag)
        if message is not None:
            self._injector.check("receive", tag)
        return message


ALIGN = "align"
# ns by which the common start is after the latest clock, so that every rank receives it in time.
_START_DELAY = 1_000_000


class RankContext(NamedTuple):
    """``link``: to the other ranks, where there are any. ``stage``: the part of a pipeline. ``place``: the role behind
    a router. ``share``: the requests of a data-parallel rank. ``fault_injector``: where the scenario scripts failures.
    ``fake_transfer``: KV is announced and never sent.

    A rank runs ``RunTask.run`` on a device of its own; a router has no device and runs ``RunTask.route``."""

    name: str = ""
    link: Link | None = None
    stage: Stage | None = None
    place: RankLayout | None = None
    share: RankShare | None = None
    fault_injector: FaultInjector | None = None
    fake_transfer: bool = False

    def linked(self, link: Link, scenario: Scenario, kill: Callable[[str], None]) -> RankContext:
        """The rank with its link. ``kill`` is called where the scenario scripts its death."""
        injector = None
        if scenario.faults:
            injector = FaultInjector(scenario, self.name, kill)
            link = _FaultInjectingLink(link, injector)
        if self.fake_transfer and self.place is not None:
            link = FakeLink(link, self.place)
        return self._replace(link=link, fault_injector=injector)

    @property
    def is_router(self) -> bool:
        return self.place is not None and self.place.role == "router"

    @property
    def rank(self) -> int:
        if self.link is not None:
            return self.link.rank
        return 0 if self.place is None else self.place.rank

    def layers(self, model: ModelConfig) -> range:
        """The layers of the model that this rank computes."""
        return range(model.num_layers) if self.stage is None else self.stage.layers

    def source(self, source: RequestSource) -> RequestSource:
        """Where the rank's requests come from."""
        if self.place is not None:
            if self.link is None or self.link.size <= self.place.router:  # no router sends requests
                return WorkerSource(source, self.place)
            return RoutedSource(self.link, self.place)
        if self.share is not None:
            return PartitionedSource(source, self.share)
        if self.stage is None or self.link is None:
            return source
        return StageSource(source, self.link, self.stage)

    @property
    def reports_requests(self) -> bool:
        """Whether requests end on this rank for their clients."""
        if self.share is not None:
            return True
        return self.rank == 0 if self.place is None else self.place.ends

    @property
    def decodes(self) -> bool:
        return self.place is None or self.place.role == "decode"

    @property
    def computes_prompts(self) -> bool:
        """Whether the rank computes prompts, whose prefixes it can share: a decode worker does not."""
        return self.place is None or self.place.role != "decode"

    def proxies(self, model: ModelConfig, tags: TagPool | None) -> Sequence[GraphInput]:
        """What the rank's forwards take from the previous stage; where tags are kept, the tokens too."""
        if self.stage is None or self.stage.is_first:
            return ()
        hidden = GraphInput((model.hidden_size,), model.dtype)
        return (hidden, hidden, *(() if tags is None else (GraphInput((), torch.int64),)))


ALONE = RankContext()


def align(context: RankContext, clock: Clock) -> int:
    """Advance every rank's clock to one common instant, not before the latest clock; return it, in ns."""
    link = context.link
    if link is None:
        return clock.now()
    if link.rank:
        link.send(0, ALIGN, clock.now())
        at: int = link.receive(0, ALIGN).value
    else:
        others = range(1, link.size)
        at = max(clock.now(), *(link.receive(rank, ALIGN).value for rank in others)) + _START_DELAY
        for rank in others:
            link.send(rank, ALIGN, at)
    clock.sleep_until(at)
    return at
