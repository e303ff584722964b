"""Attributes that are replaced for the duration of a block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


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
