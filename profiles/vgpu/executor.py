"""Executors compute the values of operations, each given as (op, held arguments).

The first one computes at once, in program order. Others skip floats, record operations for a graph, or compute as late
as the order of the streams allows. Executors are independent of time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from ...sched.kernels.declare import Kernel, meta_tensor
from .torch_ops import cat, copy_

Operation = Callable[..., Any]
Args = Sequence[Any]
Kwargs = Mapping[str, Any]
_NO_KWARGS: Kwargs = {}
_ZERO: Operation = torch.ops.aten.zero_.default


class TensorSpec(NamedTuple):
    """What is needed to allocate a tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Executor:
    """Computes everything at once. ``eager``: values are computed when a call returns. ``immediate`` is the executor
    that computes in the end."""

    eager = True

    def __init__(self, immediate: Executor | None = None) -> None:
        self.immediate = immediate or self

    def empty(self, spec: TensorSpec) -> torch.Tensor:
        """New device memory."""
        return empty_strided(spec.size, spec.stride, dtype=spec.dtype)

    def zeros(self, spec: TensorSpec) -> torch.Tensor:
        """New device memory that holds zeros."""
        tensor = self.empty(spec)
        self.mutate(_ZERO, (tensor,), _NO_KWARGS)
        return tensor

    def compute(self, op: Operation, args: Args, kwargs: Kwargs) -> Any:
        """Results of an op without side effects."""
        return op(*args, **kwargs)

    def mutate(self, op: Operation, args: Args, kwargs: Kwargs) -> None:
        """Run an in-place op for its effect."""
        op(*args, **kwargs)

    def launch(self, kernel: Kernel, args: Args) -> Any:
        """Results and effects of a custom kernel."""
        return kernel.impl(*args)

    def replay(self, nodes: Iterable[Callable[[], object]]) -> None:
        """Compute the nodes of a graph, in their order."""
        for node in nodes:
            node()

    def upload(self, target: torch.Tensor, source: torch.Tensor, *, pinned: bool, waits: bool) -> None:  # noqa: ARG002
        """Copy a host tensor into device memory. ``waits``: the host waits for the copy."""
        target.copy_(source)

    def download(self, target: torch.Tensor, source: torch.Tensor, *, waits: bool) -> None:  # noqa: ARG002
        """Copy device values into a host tensor."""
        target.copy_(source)

    def read(self, op: Operation, args: Args, kwargs: Kwargs) -> Any:
        """A result that the host needs: a number, or a tensor whose shape depends on values."""
        return op(*args, **kwargs)


def compute_into(results: Any, op: Operation, args: Args, kwargs: Kwargs) -> None:
    """Compute into memory that is already allocated."""
    values = op(*args, **kwargs)
    if isinstance(results, torch.Tensor):
        results.copy_(values)
    elif results is not None:
        for result, value in zip(results, values, strict=True):
            result.copy_(value)


_META = torch.device("meta")
empty_strided = torch.empty_strided  # without the parameter that an emulated device adds
MAX_SPECS = 20_000  # shapes vary with the workload, and each is used by a few ops
# Elements up to which an op is tried out on real memory: torch's Meta kernels of some ops first load a compiler, which
# takes seconds.
MAX_TRIED_ELEMENTS = 1 << 20
LARGE_ELEMENTS = 1 << 16  # NumPy takes longer than torch for small arrays, and torch cannot resize its memory


class SkippingExecutor(Executor):
    """Values none: floats, and what is read from them, are not computed; integers and booleans are real.

    Floating tensors are torch's meta tensors. Torch's own Meta kernels are slow, so the shapes that an op returns are
    cached for every combination of shapes, strides, types and other arguments.
    """

    def __init__(self) -> None:
        super().__init__()
        self._specs = ResultSpecs()
        # By a kernel's first launch, since all its launches have arguments of the same types.
        self._computed: dict[Kernel, bool] = {}

    def empty(self, spec: TensorSpec) -> torch.Tensor:
        size, stride, dtype = spec
        if dtype.is_floating_point:
            return empty_strided(size, stride, dtype=dtype, device=_META)
        return empty_strided(size, stride, dtype=dtype).zero_()

    def zeros(self, spec: TensorSpec) -> torch.Tensor:
        """The pages of a large table are not touched, most of which a run leaves empty."""
        size, _, dtype = spec
        if dtype.is_floating_point or prod(size) < LARGE_ELEMENTS:
            return self.empty(spec)
        return torch.from_numpy(np.zeros(size, torch.empty(0, dtype=dtype).numpy().dtype))

    def compute(self, op: Operation, args: Args, kwargs: Kwargs) -> Any:
        if is_uncomputed(args, kwargs):
            return allocate(self._specs(op, args, kwargs), self.empty)
        return self._remade(op(*args, **kwargs), floats=True)

    def mutate(self, op: Operation, args: Args, kwargs: Kwargs) -> None:
        if not is_uncomputed(args, kwargs):
            op(*args, **kwargs)

    def launch(self, kernel: Kernel, args: Args) -> Any:
        computed = self._computed.get(kernel)
        if computed is None:
            computed = self._computed[kernel] = kernel.unread_floats or not is_uncomputed(args)
        if computed:
            return kernel.impl(*args)
        return self._remade(kernel.meta(*args), floats=False)

    def upload(self, target: torch.Tensor, source: torch.Tensor, *, pinned: bool, waits: bool) -> None:  # noqa: ARG002
        self.mutate(copy_, (target, source), {})

    def download(self, target: torch.Tensor, source: torch.Tensor, *, waits: bool) -> None:  # noqa: ARG002
        if source.is_meta:
            target.zero_()
        else:
            target.copy_(source)

    def read(self, op: Operation, args: Args, kwargs: Kwargs) -> Any:
        if not is_uncomputed(args, kwargs):
            return self._remade(op(*args, **kwargs), floats=True)
        if op is torch.ops.aten._local_scalar_dense.default._op:
            return 0.0
        raise ValueError(f"values none: the result of {op.__name__} depends on floats that were not computed")

    def _remade(self, out: Any, *, floats: bool) -> Any:
        """The results with new memory in place of the floats, which may have been computed from integers, or of the
        integers, which then hold zeros."""
        if isinstance(out, torch.Tensor):
            return self.empty(spec_of(out)) if out.is_floating_point() == floats else out
        if isinstance(out, (list, tuple)):
            return [self._remade(o, floats=floats) for o in out]
        return out


class ResultSpecs:
    """The specs of ops' results, found once for arguments of the same form. ``computed``: the integers among the
    arguments have their values, as indices need."""

    def __init__(self, *, computed: bool = True) -> None:
        self._known: dict[Any, Any] = {}
        self._computed = computed

    def __call__(self, op: Operation, args: Args, kwargs: Kwargs) -> Any:
        """A TensorSpec, a list of them, or None for an op without a result."""
        key = (
            op,
            form_of(args),
            tuple((name, form_of((value,))) for name, value in kwargs.items()) if kwargs else (),
        )
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= MAX_SPECS:
                self._known.clear()
            known = self._known[key] = mapped(self._tried(op, args, kwargs), spec_of)
        return known

    def _tried(self, op: Operation, args: Args, kwargs: Kwargs) -> Any:
        """The op's results for arguments of the same form."""

        def tried(like: Callable[[torch.Tensor], torch.Tensor]) -> Any:
            given = {name: mapped(value, like) for name, value in kwargs.items()}
            return op(*(mapped(value, like) for value in args), **given)

        if sum(tensor.numel() for tensor in tensors_in([args, kwargs])) > MAX_TRIED_ELEMENTS:
            return _joined(*args, **kwargs) if op is cat else tried(_meta_like)
        if self._computed:  # integers as they are, since they may be indices; uninitialised memory for floats
            return tried(lambda tensor: _same_form(tensor) if tensor.is_meta else tensor)
        try:
            return tried(lambda tensor: _same_form(tensor).zero_())
        except RuntimeError:  # integers were divided by zero
            return tried(_meta_like)


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.size()), tensor.stride(), tensor.dtype)


def allocate(specs: Any, empty: Callable[[TensorSpec], torch.Tensor]) -> Any:
    """Allocate a tensor for each spec; None for None."""
    if specs is None or isinstance(specs, TensorSpec):
        return specs if specs is None else empty(specs)
    return [empty(spec) for spec in specs]


def is_uncomputed(args: Args, kwargs: Kwargs = _NO_KWARGS) -> bool:
    """Whether any of the arguments is a float that was not computed."""
    if kwargs and is_uncomputed(tuple(kwargs.values())):
        return True
    for value in args:
        kind = type(value)
        if kind is torch.Tensor:
            if value.is_meta:
                return True
        elif (kind is list or kind is tuple) and is_uncomputed(value):
            return True
    return False


def form_of(values: Args) -> tuple[Any, ...]:
    """Equal for arguments of the same shapes, strides and types, where those that are no tensors are equal."""
    parts: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            parts.append((value.size(), value.stride(), value.dtype))
        elif isinstance(value, (list, tuple)):
            parts.append(form_of(value))
        else:
            parts.append((type(value), value))
    return tuple(parts)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a value and in the lists, tuples and mappings in it."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))


def mapped(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """The value with the function's result in the place of each tensor in it and in its lists and tuples."""
    if isinstance(value, torch.Tensor):
        return function(value)
    return [mapped(part, function) for part in value] if isinstance(value, (list, tuple)) else value


def _same_form(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    return empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)


def _meta_like(tensor: torch.Tensor) -> torch.Tensor:
    return _same_form(tensor, _META)


def _joined(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """The form of the result of ``torch.cat`` on tensors that are not all empty. Torch's own function for the meta
    device imports a compiler."""
    # torch.cat ignores empty tensors of one dimension, whatever the dimension of the others.
    filled = [tensor for tensor in tensors if tensor.size() != (0,)]
    shape, dtype = list(filled[0].size()), filled[0].dtype
    if len(shape) > 3 or any(t.dtype != dtype for t in tensors) or any(t.dim() != len(shape) for t in filled):
        return torch.cat([_meta_like(tensor) for tensor in tensors], dim)
    shape[dim] = sum(tensor.size(dim) for tensor in filled)
    return meta_tensor(*shape, dtype=dtype)
