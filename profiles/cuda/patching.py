"""Replacing calls of torch's Python API for the duration of a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

Function = Callable[..., Any]


class Target(NamedTuple):
    """``owner.name``, a function or method; ``call`` names it as the CUDA runtime would."""

    owner: Any
    name: str
    call: str


@contextmanager
def replaced(targets: Iterable[Target], wrap: Callable[[Target, Function], Function]) -> Iterator[None]:
    """Each target replaced by ``wrap(target, what it was)``; all are as before when the block ends."""
    with ExitStack() as undo:
        for target in targets:
            undo.enter_context(_replaced(target, wrap))
        yield


@contextmanager
def _replaced(target: Target, wrap: Callable[[Target, Function], Function]) -> Iterator[None]:
    owner, name, _ = target
    own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, wrap(target, before))
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)  # inherited again
