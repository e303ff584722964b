"""Values none: floats are not computed and not held; integers and booleans are real.

A floating tensor lies on torch's meta device. Torch's own Meta kernels are slow, so what an op would return is
learnt once for every combination of shapes, strides, types and other arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ...sched.kernels.registry import Kernel
from .bindings import copy_
from .executor import Args, Executor, Kwargs, Operation, Outline

_META = torch.device("meta")
_NOTHING: Kwargs = {}
OUTLINES = 20_000  # shapes vary with the workload; a few ops each
# Up to so many numbers an op is tried out on real memory: torch's Meta kernels of some ops load half a second of
# compiler first.
TRIED = 1 << 20


class SkippingExecutor:
    prompt = True

    def __init__(self) -> None:
        self._outlines = Outlines()

    @property
    def immediate(self) -> Executor:
        return self

    def empty(self, outline: Outline) -> torch.Tensor:
        size, stride, dtype = outline
        if dtype.is_floating_point:
            return torch.empty_strided(size, stride, dtype=dtype, device=_META)
        return torch.empty_strided(size, stride, dtype=dtype).zero_()

    def compute(self, op: Operation, args: Args, kwargs: Kwargs) -> Any:
        if unknown(args, kwargs):
            return build(self._outlines(op, args, kwargs), self.empty)
        return self._without_floats(op(*args, **kwargs))

    def mutate(self, op: Operation, args: Args, kwargs: Kwargs) -> None:
        if not unknown(args, kwargs):
            op(*args, **kwargs)

    def launch(self, kernel: Kernel, args: Args, kwargs: Kwargs) -> Any:
        if kernel.integer:
            return self._without_floats(kernel.impl(*args, **kwargs))
        return self._with_integers(kernel.meta(*args, **kwargs))

    def replay(self, nodes: Iterable[Callable[[], object]]) -> None:
        for node in nodes:
            node()

    def upload(self, target: torch.Tensor, source: torch.Tensor, *, pinned: bool, waits: bool) -> None:  # noqa: ARG002
        self.mutate(copy_, (target, source), {})

    def download(self, target: torch.Tensor, source: torch.Tensor, *, waits: bool) -> None:  # noqa: ARG002
        if source.is_meta:
            target.zero_()
        else:
            target.copy_(source)

    def read(self, op: Operation, args: Args, kwargs: Kwargs) -> Any:
        if not unknown(args, kwargs):
            return self._without_floats(op(*args, **kwargs))
        if op is torch.ops.aten._local_scalar_dense.default._op:
            return 0.0
        raise ValueError(f"values none: the result of {op.__name__} depends on floats that were not computed")

    def _without_floats(self, out: Any) -> Any:
        """Floats made from integers are dropped too."""
        if isinstance(out, torch.Tensor):
            return self.empty(outline(out)) if out.is_floating_point() else out
        if isinstance(out, (list, tuple)):
            return [self._without_floats(o) for o in out]
        return out

    def _with_integers(self, out: Any) -> Any:
        """A skipped kernel's integer results hold zeros."""
        if isinstance(out, torch.Tensor):
            return out if out.is_floating_point() else self.empty(outline(out))
        if isinstance(out, (list, tuple)):
            return [self._with_integers(o) for o in out]
        return out


class Outlines:
    """What ops return, without running them twice on the same shapes."""

    def __init__(self, *, tried: int = TRIED) -> None:
        self._known: dict[Any, Any] = {}
        self._tried = tried

    def __call__(self, op: Operation, args: Args, kwargs: Kwargs) -> Any:
        """An Outline, or a list of them."""
        key = (
            op,
            _key(args),
            tuple((name, _key((value,))) for name, value in kwargs.items()) if kwargs else (),
        )
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= OUTLINES:
                self._known.clear()
            stand_in = _host_like if _numbers((*args, *kwargs.values())) <= self._tried else _meta_like
            given = {name: _replaced(value, stand_in) for name, value in kwargs.items()}
            results = op(*(_replaced(value, stand_in) for value in args), **given)
            known = self._known[key] = _outlined(results)
        return known


def outline(tensor: torch.Tensor) -> Outline:
    return Outline(tuple(tensor.size()), tensor.stride(), tensor.dtype)


def build(outlines: Any, empty: Any) -> Any:
    """Tensors in the place of outlines."""
    return empty(outlines) if isinstance(outlines, Outline) else [empty(o) for o in outlines]


def in_place_of(shapes: Any, empty: Callable[[Outline], torch.Tensor]) -> Any:
    """Tensors like those shapes, which may be tensors of any device; None for None."""
    if shapes is None:
        return None
    if isinstance(shapes, torch.Tensor):
        return empty(outline(shapes))
    return [empty(outline(shape)) for shape in shapes]


def unknown(args: Args, kwargs: Kwargs = _NOTHING) -> bool:
    """Whether any of the arguments is a float that was not computed."""
    if kwargs and unknown(tuple(kwargs.values())):
        return True
    for value in args:
        kind = type(value)
        if kind is torch.Tensor:
            if value.is_meta:
                return True
        elif (kind is list or kind is tuple) and unknown(value):
            return True
    return False


def _key(values: Args) -> tuple[Any, ...]:
    parts: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            parts.append((value.size(), value.stride(), value.dtype))
        elif isinstance(value, (list, tuple)):
            parts.append(_key(value))
        else:
            parts.append((type(value), value))
    return tuple(parts)


def _numbers(values: Args) -> int:
    """Elements of all tensors among the values."""
    return sum(
        value.numel() if isinstance(value, torch.Tensor) else _numbers(value)
        for value in values
        if isinstance(value, (torch.Tensor, list, tuple))
    )


def _replaced(value: Any, stand_in: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return stand_in(value)
    if isinstance(value, (list, tuple)):
        return [_replaced(v, stand_in) for v in value]
    return value


def _meta_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_META)


def _host_like(tensor: torch.Tensor) -> torch.Tensor:
    """Integers as they are, for they may be indices; some memory for floats."""
    if not tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)


def _outlined(results: Any) -> Any:
    return outline(results) if isinstance(results, torch.Tensor) else [outline(r) for r in results]
