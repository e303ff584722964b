"""Every way in which the scheduler's code enters the virtual GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any

import torch

from ...sched.model import tags
from . import registration, streams
from .copies import CopyHandlers
from .graph import CUDAGraph, graph
from .patches import replace
from .runtime import Runtime
from .tensor import DeviceTensor

Function = Callable[..., Any]

# Of these, all methods.
_CLASSES = (
    streams.Stream,
    streams.Event,
    streams.StreamContext,
    CUDAGraph,
    graph,
    registration.DeviceModule,
)
_SINGLE: tuple[tuple[Any, str], ...] = (
    (DeviceTensor, "__torch_dispatch__"),
    (registration, "new"),
    (registration, "generated"),
    (CopyHandlers, "copy"),  # uploads come by a registered kernel, not by dispatch
    (Runtime, "copy"),  # so does reading one number
    (torch.Tensor, "pin_memory"),
    (Runtime, "pin"),
    (tags, "kv_tags"),  # of ``values: none``; no device would run it
)


@contextmanager
def doors_off(off: Callable[[Function], Function]) -> Iterator[None]:
    """Every door replaced by ``off(door)`` for the duration of a block."""
    with ExitStack() as undo:
        for owner, name in _doors():
            undo.callback(replace(owner, name, _fitted(vars(owner)[name], off)))
        yield


def _doors() -> Iterator[tuple[Any, str]]:
    yield from _SINGLE
    for owner in _CLASSES:
        members = list(vars(owner).items())
        yield from ((owner, name) for name, member in members if isinstance(member, FunctionType))


def _fitted(door: Any, off: Callable[[Function], Function]) -> Any:
    return classmethod(off(door.__func__)) if isinstance(door, classmethod) else off(door)
