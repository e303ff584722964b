"""Computes later: results have their memory at once and their values when their stream gets there.

What is not there yet holds poison, so that whoever reads too early reads nothing plausible. Shapes come from torch's
Meta kernels, learnt once for each combination of arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from ....sched.kernels.registry import Kernel
from ..executor import Args, Executor, Kwargs, Operation, Outline, into
from ..skipping import Outlines, build, in_place_of
from .order import DeferredTask
from .runtime import DeferredRuntime

# Of wide integers: no index, no length and no token, and not so large that a loop over it never ends.
POISON = -1_000_003


class AdversarialExecutor:
    """Hands everything on to ``immediate`` when its turn in its stream has come."""

    prompt = False

    def __init__(self, immediate: Executor, runtime: DeferredRuntime) -> None:
        self.immediate = immediate
        self._runtime = runtime
        self._outlines = Outlines(tried=0)
        self._sending: list[int] = []  # addresses of pinned memory that copies have yet to read; they hold it

    def empty(self, outline: Outline) -> torch.Tensor:
        return poisoned(self.immediate.empty(outline))

    def compute(self, op: Operation, args: Args, kwargs: Kwargs) -> Any:
        results = build(self._outlines(op, args, kwargs), self.empty)
        self._later(op.__name__, partial(into, results, self.immediate.compute, (op, args, kwargs), {}))
        return results

    def mutate(self, op: Operation, args: Args, kwargs: Kwargs) -> None:
        self._later(op.__name__, partial(self.immediate.mutate, op, args, kwargs))

    def launch(self, kernel: Kernel, args: Args, kwargs: Kwargs) -> Any:
        results = in_place_of(kernel.meta(*args, **kwargs), self.empty)
        self._later(kernel.name, partial(into, results, self.immediate.launch, (kernel, args, kwargs), {}))
        return results

    def replay(self, nodes: Iterable[Callable[[], object]]) -> None:
        """Other streams may come between any two nodes."""
        for node in nodes:
            self._later("graph", node)

    def upload(self, target: torch.Tensor, source: torch.Tensor, *, pinned: bool, waits: bool) -> None:
        """Pinned memory is read when the copy is made; anything else is taken along in the call."""
        taken = source if pinned else source.clone()
        copy = partial(self.immediate.upload, target, taken, pinned=pinned, waits=waits)
        if pinned:
            self._sending.append(taken.untyped_storage().data_ptr())
        self._later("copy h2d", partial(self._read_out, taken.untyped_storage(), copy) if pinned else copy)
        if waits:
            self._runtime.order.finish(self._runtime.stream.id)

    def download(self, target: torch.Tensor, source: torch.Tensor, *, waits: bool) -> None:
        if not waits:
            self._poison_host(target)
        self._later("copy d2h", partial(self.immediate.download, target, source, waits=waits))
        if waits:
            self._runtime.order.finish(self._runtime.stream.id)

    def read(self, op: Operation, args: Args, kwargs: Kwargs) -> Any:
        self._runtime.order.finish(self._runtime.stream.id)
        return self.immediate.read(op, args, kwargs)

    def _read_out(self, storage: torch.UntypedStorage, copy: Callable[[], object]) -> None:
        copy()
        self._sending.remove(storage.data_ptr())

    def _poison_host(self, target: torch.Tensor) -> None:
        """At once, or in the stream's order where an earlier copy has yet to read the same memory."""
        if target.untyped_storage().data_ptr() in self._sending:
            self._later("poison", partial(poisoned, target))
        else:
            poisoned(target)

    def _later(self, name: str, work: Callable[[], object]) -> None:
        runtime = self._runtime
        site = runtime.sites.here()
        runtime.order.launch(runtime.stream.id, DeferredTask(work, partial(self._said, name, site)))

    def _said(self, name: str, site: int) -> str:
        where = self._runtime.sites.resolved()[site] if site >= 0 else None
        return f"{name} at {where.file}:{where.line}" if where else name


def poisoned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, filled with what nobody can have meant."""
    if tensor.is_meta:
        return tensor
    kind = tensor.dtype
    if kind.is_floating_point or kind.is_complex:
        return tensor.fill_(torch.nan)
    if kind is torch.bool:
        return tensor.fill_(True)
    wide = kind in (torch.int64, torch.int32)
    return tensor.fill_(POISON if wide else torch.iinfo(kind).max)
