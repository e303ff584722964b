"""Attributes, functions and methods that are replaced for the duration of a block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any, NamedTuple

Function = Callable[..., Any]


class Target(NamedTuple):
    """``owner.name`` is a function or method; ``call`` is its name in the CUDA runtime."""

    owner: Any
    name: str
    call: str


def replaced(
    targets: Iterable[Target], wrap: Callable[[Target, Function], Function]
) -> AbstractContextManager[None]:
    """Replace each target by ``wrap(target, original)``; all are restored when the block ends."""
    return attributes_set(
        (target.owner, target.name, wrap(target, getattr(target.owner, target.name))) for target in targets
    )


def surrounded(original: Function, around: Function) -> Function:
    """A function that calls ``around`` with the original in front of its own arguments."""

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    return call


@contextmanager
def attributes_set(values: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set each (owner, name, value) and restore all when the block ends; inherited attributes are inherited again."""
    with ExitStack() as undo:
        for owner, name, value in values:
            undo.callback(_set(owner, name, value))
        yield


def _set(owner: Any, name: str, value: Any) -> Callable[[], None]:
    own = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)
    return (lambda: setattr(owner, name, before)) if own else (lambda: delattr(owner, name))
