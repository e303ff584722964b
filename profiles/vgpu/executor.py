"""Executors compute the values of operations, each given as (op, held arguments).

The eager executor computes at once, in program order. Others skip floats, record operations for a graph, or compute as
late as the order of the streams allows. Executors are independent of time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ...sched.kernels.registry import Kernel

Operation = Callable[..., Any]
Args = Sequence[Any]
Kwargs = Mapping[str, Any]


class TensorSpec(NamedTuple):
    """What is needed to allocate a tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Executor(Protocol):
    """``eager``: values are computed when a call returns. ``immediate`` is the executor that computes in the end."""

    @property
    def eager(self) -> bool: ...

    @property
    def immediate(self) -> Executor: ...

    def empty(self, spec: TensorSpec) -> torch.Tensor:
        """New device memory."""

    def compute(self, op: Operation, args: Args, kwargs: Kwargs) -> Any:
        """Results of an op without side effects."""

    def mutate(self, op: Operation, args: Args, kwargs: Kwargs) -> None:
        """Run an in-place op for its effect."""

    def launch(self, kernel: Kernel, args: Args, kwargs: Kwargs) -> Any:
        """Results and effects of a custom kernel."""

    def replay(self, nodes: Iterable[Callable[[], object]]) -> None:
        """Compute the nodes of a graph, in their order."""

    def upload(self, target: torch.Tensor, source: torch.Tensor, *, pinned: bool, waits: bool) -> None:
        """Copy a host tensor into device memory. ``waits``: the host waits for the copy."""

    def download(self, target: torch.Tensor, source: torch.Tensor, *, waits: bool) -> None:
        """Copy device values into a host tensor."""

    def read(self, op: Operation, args: Args, kwargs: Kwargs) -> Any:
        """A result that the host needs: a number, or a tensor whose shape depends on values."""


class EagerExecutor:
    """Computes everything at once."""

    eager = True

    @property
    def immediate(self) -> Executor:
        return self

    def empty(self, spec: TensorSpec) -> torch.Tensor:
        return torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype)

    def compute(self, op: Operation, args: Args, kwargs: Kwargs) -> Any:
        return op(*args, **kwargs)

    def mutate(self, op: Operation, args: Args, kwargs: Kwargs) -> None:
        op(*args, **kwargs)

    def launch(self, kernel: Kernel, args: Args, kwargs: Kwargs) -> Any:
        return kernel.impl(*args, **kwargs)

    def replay(self, nodes: Iterable[Callable[[], object]]) -> None:
        for node in nodes:
            node()

    def upload(self, target: torch.Tensor, source: torch.Tensor, *, pinned: bool, waits: bool) -> None:  # noqa: ARG002
        target.copy_(source)

    def download(self, target: torch.Tensor, source: torch.Tensor, *, waits: bool) -> None:  # noqa: ARG002
        target.copy_(source)

    def read(self, op: Operation, args: Args, kwargs: Kwargs) -> Any:
        return op(*args, **kwargs)


def compute_into(results: Any, op: Operation, args: Args, kwargs: Kwargs) -> None:
    """Compute into memory that is already allocated."""
    values = op(*args, **kwargs)
    if isinstance(results, torch.Tensor):
        results.copy_(values)
    elif results is not None:
        for result, value in zip(results, values, strict=True):
            result.copy_(value)
