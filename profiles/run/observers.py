"""Observers of every run: several as one, the audit of KV tags, and clients that abort."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from copy import copy
from typing import Any, Protocol

import torch

from ...sched.model.tags import TagPool, audit
from ...sched.observe import NO_STEP, Observer
from ...sched.request import Request
from .feed import ABORTED, Feed

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
        self._rangers = _RangersByName([x for x in observers if _overrides(x, "range")])

    def range(self, name: str, step: int, size: int) -> AbstractContextManager[object]:
        return self._rangers[name](name, step, size)


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


class _RangersByName(dict[str, Ranger]):
    """Opens a range by its name, as all observers do that ask for it."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers

    def __missing__(self, name: str) -> Ranger:
        asking = [x for x in self._observers if x.range_names is None or name in x.range_names]
        self[name] = _nested([x.range for x in asking])
        return self[name]


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
        self._rows = peek(req_to_token)
        self._tags = copy(tags)
        for name in ("tags", "sums", "weights"):
            setattr(self._tags, name, peek(getattr(tags, name)))

    def ending(self, request: Request) -> None:
        length = request.seqlen - 1  # the last token's KV was never computed
        assert request.req_pool_idx is not None
        difference = audit(self._tags, self._rows[request.req_pool_idx], length)
        if difference:
            self.damage[request.id] = difference


class AbortingSystem(Protocol):
    def abort(self, request: Request, reason: str) -> None: ...


class ScriptedAborts(Observer):
    """Aborts requests where the workload has their clients do so."""

    def __init__(self, feed: Feed, system: AbortingSystem) -> None:
        self._feed = feed
        self._system = system

    def tokens(self, requests: Sequence[Request], count: int) -> None:  # noqa: ARG002
        for request in requests:
            if self._feed.aborts_now(request):
                self._system.abort(request, ABORTED)
