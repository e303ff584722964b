"""Who computes values, and when. An operation is handed over as (op, held arguments).

The eager executor computes at once, in program order. Others may skip floats, record for a graph, or compute as
late as the order of the streams allows; none of them knows of time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    def empty(self, outline: Outline) -> torch.Tensor:
        """New device memory."""

    def compute(self, op: Operation, args: Args, kwargs: Kwargs) -> Any:
        """Results of an op without side effects."""

    def mutate(self, op: Operation, args: Args, kwargs: Kwargs) -> None:
        """Run an in-place op for its effect."""

    def launch(self, kernel: Kernel, args: Args, kwargs: Kwargs) -> Any:
        """Results and effects of a custom kernel."""

    def download(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Device values into a host tensor."""

    def read(self, op: Operation, args: Args, kwargs: Kwargs) -> Any:
        """What the host has asked for by value: a number, or a result whose shape depends on values."""


class EagerExecutor:
    """Everything, at once."""

    def empty(self, outline: Outline) -> torch.Tensor:
        return torch.empty_strided(outline.size, outline.stride, dtype=outline.dtype)

    def compute(self, op: Operation, args: Args, kwargs: Kwargs) -> Any:
        return op(*args, **kwargs)

    def mutate(self, op: Operation, args: Args, kwargs: Kwargs) -> None:
        op(*args, **kwargs)

    def launch(self, kernel: Kernel, args: Args, kwargs: Kwargs) -> Any:
        return kernel.impl(*args, **kwargs)

    def download(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def read(self, op: Operation, args: Args, kwargs: Kwargs) -> Any:
        return op(*args, **kwargs)
