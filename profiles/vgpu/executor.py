"""Who computes values, and when. An operation is handed over as (op, held arguments).

The eager executor computes at once, in program order. Others may skip floats, record for a graph, or compute as
late as the order of the streams allows; none of them knows of time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ...sched.kernels.registry import Kernel

Operation = Callable[..., Any]
Args = Sequence[Any]
Kwargs = Mapping[str, Any]


class Outline(NamedTuple):
    """A tensor without its values."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Executor(Protocol):
    """``prompt``: values are there when a call returns. ``immediate`` is who computes in the end."""

    @property
    def prompt(self) -> bool: ...

    @property
    def immediate(self) -> Executor: ...

    def empty(self, outline: Outline) -> torch.Tensor:
        """New device memory."""

    def compute(self, op: Operation, args: Args, kwargs: Kwargs) -> Any:
        """Results of an op without side effects."""

    def mutate(self, op: Operation, args: Args, kwargs: Kwargs) -> None:
        """Run an in-place op for its effect."""

    def launch(self, kernel: Kernel, args: Args, kwargs: Kwargs) -> Any:
        """Results and effects of a custom kernel."""

    def replay(self, nodes: Iterable[Callable[[], object]]) -> None:
        """The live nodes of a graph, in their order."""

    def upload(self, target: torch.Tensor, source: torch.Tensor, *, pinned: bool, waits: bool) -> None:
        """A host tensor into device memory. ``waits``: the host does, for the copy."""

    def download(self, target: torch.Tensor, source: torch.Tensor, *, waits: bool) -> None:
        """Device values into a host tensor."""

    def read(self, op: Operation, args: Args, kwargs: Kwargs) -> Any:
        """What the host has asked for by value: a number, or a result whose shape depends on values."""


class EagerExecutor:
    """Everything, at once."""

    prompt = True

    @property
    def immediate(self) -> Executor:
        return self

    def empty(self, outline: Outline) -> torch.Tensor:
        return torch.empty_strided(outline.size, outline.stride, dtype=outline.dtype)

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


def into(results: Any, op: Operation, args: Args, kwargs: Kwargs) -> None:
    """Compute into memory that is there already."""
    values = op(*args, **kwargs)
    if isinstance(results, torch.Tensor):
        results.copy_(values)
    elif results is not None:
        for result, value in zip(results, values, strict=True):
            result.copy_(value)
