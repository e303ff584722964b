"""Replaces functions and methods of torch's Python API for the duration of a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

Function = Callable[..., Any]


class Target(NamedTuple):
    """``owner.name`` is a function or method; ``call`` is its name in the CUDA runtime."""

    owner: Any
    name: str
    call: str


@contextmanager
def replaced(targets: Iterable[Target], wrap: Callable[[Target, Function], Function]) -> Iterator[None]:
    """Replace each target by ``wrap(target, original)``; all are restored when the block ends."""
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
            delattr(owner, name)  # the inherited attribute shows again
