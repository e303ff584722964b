"""Several listeners as one observer. A hook that nobody overrides costs one lookup."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from ...sched.observe import NO_STEP, Observer

_HOOKS = (
    "stream",
    "planned",
    "launched",
    "settled",
    "tokens",
    "verified",
    "ending",
    "ended",
    "retracted",
    "kv_usage",
)


class ObserverGroup(Observer):
    """``set`` replaces the listeners; the scheduler keeps the same observer."""

    def __init__(self, *listeners: Observer) -> None:
        self.set(*listeners)

    def set(self, *listeners: Observer) -> None:
        for hook in _HOOKS:
            setattr(self, hook, _together([getattr(x, hook) for x in listeners if _hears(x, hook)]))
        self._range = _nested([x.range for x in listeners if _hears(x, "range")])

    def range(self, name: str, step: int, size: int) -> AbstractContextManager[object]:
        return self._range(name, step, size)


def _hears(listener: Observer, hook: str) -> bool:
    return getattr(type(listener), hook) is not getattr(Observer, hook)


def _together(calls: list[Callable[..., None]]) -> Callable[..., None]:
    if len(calls) == 1:
        return calls[0]

    def all_of_them(*arguments: Any) -> None:
        for call in calls:
            call(*arguments)

    return all_of_them


_NOTHING = Observer().range("", NO_STEP, 0)  # of a listener that has nothing to do when the range ends
Ranger = Callable[[str, int, int], AbstractContextManager[object]]


def _nested(rangers: Sequence[Ranger]) -> Ranger:
    if not rangers:
        return Observer().range
    if len(rangers) == 1:
        return rangers[0]

    def together(name: str, step: int, size: int) -> AbstractContextManager[object]:
        managers = [m for ranger in rangers if (m := ranger(name, step, size)) is not _NOTHING]
        return managers[0] if len(managers) == 1 else _Nested(managers)

    return together


class _Nested:
    """Context managers entered in order and left in reverse."""

    __slots__ = ("_managers",)

    def __init__(self, managers: list[AbstractContextManager[object]]) -> None:
        self._managers = managers

    def __enter__(self) -> None:
        for manager in self._managers:
            manager.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for manager in reversed(self._managers):
            manager.__exit__(kind, value, traceback)
