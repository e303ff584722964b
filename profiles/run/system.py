"""What a run measures, and the observers of every run.

A system is schedbench's own scheduler (``runner.OwnSystem``) or that of another engine (``profiles.engines``). The
observers: several as one, the audit of KV tags, clients that abort, and the end of a run in which no request advances.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch

from ...sched.kernels.arrays import kept_array
from ...sched.model.tags import TagPool, audit
from ...sched.observe import NO_STEP, SLEEP, Clock, Observer, StepInfo, StepKind
from ...sched.request import Request
from ..measure.collector import LookupCount
from ..record.conclusion import number_of
from ..record.provenance import RelayPart
from .compose import Guard
from .compose import SystemParts as SystemParts
from .feed import ABORTED, Feed


class System(ABC):
    """A scheduler with its model on a machine. This base class has no hooks for checks and counts: a system overrides
    those that it offers."""

    simulated = False  # the acceptance of drafts is simulated
    aborts = True  # requests can be aborted here
    defaults: Collection[str] = ()  # what an engine's system answered by a constant
    missed: Sequence[str] = ()  # what of the scenario's controls the last run did not come to, in words
    leak = ""  # the memory that an engine holds after all requests have ended, in a sentence
    declared_hazards: Sequence[str] = ()  # names of those that its relay state declares

    @property
    @abstractmethod
    def next_step(self) -> int:
        """The number of the step that is planned next."""

    @abstractmethod
    def relay_part(self) -> RelayPart:
        """What the result says about how steps hand on their results."""

    def prepare(self) -> None:  # noqa: B027 (not every system has to)
        """Called once, before the first request."""

    @abstractmethod
    def run(self) -> None:
        """Run until every request of the source has ended. Raises LinkError where another rank is gone."""

    @abstractmethod
    def forget(self) -> None:
        """Drop what a run left in the prefix cache, so that the next run begins with the same cache."""

    @abstractmethod
    def abort(self, request: Request, reason: str) -> None:
        """End the request early, at once or when its next token arrives."""

    @abstractmethod
    def unfinished(self) -> Sequence[Request]:
        """The requests that were taken from the source and have not ended."""

    def guarded(self, guard: Guard | None) -> AbstractContextManager[Observer]:  # noqa: ARG002
        """The guard's observer of one workload."""
        return nullcontext(Observer())

    def audit(self) -> TagAudit | None:
        """The audit of KV tags, with values none."""
        return None

    def lookups(self) -> LookupCount | None:
        """The counts of lookups, where KV is on the host."""
        return None


MakeSystem = Callable[[SystemParts], System]


_HOOKS = [
    name for name in vars(Observer) if not name.startswith("_") and name not in ("range", "range_names")
]


class ObserverGroup(Observer):
    """Several observers as one. ``set`` replaces them; the scheduler keeps the same group. Each hook, and each range,
    calls those of them alone that override it or ask for it."""

    members: tuple[Observer, ...] = ()

    def __init__(self, *observers: Observer) -> None:
        self.set(*observers)

    def set(self, *given: Observer) -> None:
        """A group among them stands for those that it has now."""
        observers = [x for one in given for x in (one.members if isinstance(one, ObserverGroup) else (one,))]
        self.members = tuple(observers)
        for hook in _HOOKS:
            setattr(self, hook, _call_all([getattr(x, hook) for x in observers if _overrides(x, hook)]))
        self._ranging = [x for x in observers if _overrides(x, "range")]
        self._rangers: dict[str, Ranger] = {}

    def range(self, name: str, step: int, size: int) -> AbstractContextManager[object]:
        try:
            ranger = self._rangers[name]
        except KeyError:
            asking = [x for x in self._ranging if x.range_names is None or name in x.range_names]
            ranger = self._rangers[name] = _nested([x.range for x in asking])
        return ranger(name, step, size)


def _overrides(observer: Observer, hook: str) -> bool:
    return getattr(type(observer), hook) is not getattr(Observer, hook)


def _call_all(calls: list[Callable[..., None]]) -> Callable[..., None]:
    if len(calls) == 1:
        return calls[0]

    def call_all(*arguments: Any) -> None:
        for call in calls:
            call(*arguments)

    return call_all


_NO_RANGE = Observer().range("", NO_STEP, 0)  # of an observer that does nothing when the range ends
Ranger = Callable[[str, int, int], AbstractContextManager[object]]


def _nested(rangers: Sequence[Ranger]) -> Ranger:
    if not rangers:
        return Observer().range
    if len(rangers) == 1:
        return rangers[0]

    def nested(name: str, step: int, size: int) -> AbstractContextManager[object]:
        managers = [m for ranger in rangers if (m := ranger(name, step, size)) is not _NO_RANGE]
        return managers[0] if len(managers) == 1 else _Nested(managers)

    return nested


class _Nested:
    """Context managers that are entered in order and left in reverse."""

    __slots__ = ("_managers",)

    def __init__(self, managers: list[AbstractContextManager[object]]) -> None:
        self._managers = managers

    def __enter__(self) -> None:
        for manager in self._managers:
            manager.__enter__()

    def __exit__(self, *raised: Any) -> None:
        for manager in reversed(self._managers):
            manager.__exit__(*raised)


class TagAudit(Observer):
    """With values none: checks all KV tags of a request when it ends, while it still owns its row.

    ``damage`` has the ids of requests whose stored tags do not add up, with their sum; it enters the digest."""

    def __init__(
        self, tags: TagPool, req_to_token: torch.Tensor, peek: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self.damage: dict[str, int] = {}
        self._tags, self._req_to_token, self._peek = tags, req_to_token, peek

    def ending(self, request: Request) -> None:
        length = request.seqlen - 1  # the last token's KV was never computed
        slots = kept_array(self._peek(self._req_to_token))[request.row, :length]
        difference = audit(self._tags, slots, peek=self._peek)
        if difference:
            self.damage[request.id] = difference


class ScriptedAborts(Observer):
    """Aborts requests where the workload has their clients do so."""

    def __init__(self, feed: Feed, system: System) -> None:
        self._feed = feed
        self._system = system

    def tokens(self, requests: Sequence[Request], count: int) -> None:  # noqa: ARG002
        for request in requests:
            if self._feed.aborts_now(request):
                self._system.abort(request, ABORTED)


# A turn of the loop without a step may wait for a copy of some ten milliseconds, and takes some ten microseconds.
MOST_TURNS: Final = 20_000
# Every step gives a request tokens, or computes a part of its prompt, except for the last steps of a request.
MOST_STEPS: Final = 300
SHORTEST_WAIT: Final = 10_000
"""ns. A loop that waits for less polls, and its turns count."""


NO_PROGRESS: Final = "no request advances"


class NoProgressError(RuntimeError):
    """No request advances. The message begins with NO_PROGRESS, and says since when, and how far an unfinished request
    is."""


class ProgressWatch(Observer):
    """Raises NoProgressError at a turn of the loop, once MOST_TURNS turns or MOST_STEPS steps have passed in which no
    request got a token, was prefilled or ended, and the loop did not wait for an arrival or a message.

    Tokens are counted each time that so many have passed, since a hook for each token costs more than all others."""

    def __init__(self, system: System, clock: Clock) -> None:
        self._system = system
        self._clock = clock
        self._asleep_since: int | None = None
        self._turns = self._steps = 0
        self._tokens: int | None = 0  # of unfinished requests when they were counted last
        self._since = system.next_step

    range_names = ("receive", SLEEP)

    def range(self, name: str, step: int, size: int) -> AbstractContextManager[object]:
        if name == "receive":
            self._turn()
        elif name == SLEEP:
            self._asleep_since = self._clock.now()
        return super().range(name, step, size)

    def planned(self, step: int, kind: StepKind) -> None:  # noqa: ARG002
        if kind in ("prefill", "mixed"):
            self._advance()

    def launched(self, info: StepInfo) -> None:  # noqa: ARG002
        self._steps += 1

    def ended(self, request: Request) -> None:  # noqa: ARG002
        self._advance()

    def _advance(self, tokens: int | None = None) -> None:
        self._turns = self._steps = 0
        self._tokens = tokens

    def _turn(self) -> None:
        slept, self._asleep_since = self._asleep_since, None
        if slept is not None and self._clock.now() - slept >= SHORTEST_WAIT:
            self._advance()
        if not self._turns:
            self._since = self._system.next_step
        self._turns += 1
        if self._turns <= MOST_TURNS and self._steps <= MOST_STEPS:
            return
        found = self._system.unfinished()
        tokens = sum(len(request.output_ids) for request in found)
        if found and tokens == self._tokens:
            first = found[0]
            raise NoProgressError(
                f"{NO_PROGRESS}: since step {self._since} the loop took {self._turns} turns with"
                f" {self._steps} steps, and none of {len(found)} unfinished requests got a token ({first.id} is"
                f" {first.status.value}, with {number_of(len(first.output_ids), 'token')})"
            )
        self._advance(tokens)  # a data-parallel rank without requests takes part in the others' steps
