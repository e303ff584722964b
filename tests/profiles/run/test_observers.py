"""A group of observers calls those alone that want to be called."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest

from schedbench.profiles.run.system import ObserverGroup
from schedbench.sched.observe import Observer


class Names(Observer):
    """Records the names of the ranges that it is asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def range(self, name: str, step: int, size: int) -> AbstractContextManager[object]:
        self.asked.append(name)
        return super().range(name, step, size)


class ReceiveOnly(Names):
    range_names = ("receive",)


@pytest.mark.parametrize("nested", [False, True])
def test_an_observer_is_asked_for_the_ranges_that_it_names(nested: bool) -> None:
    every, some = Names(), ReceiveOnly()
    group = ObserverGroup(ObserverGroup(every), some) if nested else ObserverGroup(every, some)
    for name in ("receive", "prepare", "receive"):
        with group.range(name, 0, 1):
            pass
    assert every.asked == ["receive", "prepare", "receive"]
    assert some.asked == ["receive", "receive"]
    group.set(some)
    with group.range("prepare", 0, 1):
        pass
    assert every.asked == ["receive", "prepare", "receive"] and some.asked == ["receive", "receive"]
