"""Declares the custom ops of the engine, each with its cost and its footprint for a device that emulates or checks it.

A kernel is one launch on a device. ``torch.ops.schedbench.<name>`` runs the torch implementation on the CPU, and on
CUDA the Triton kernel where there is one; on a virtual GPU it arrives whole, as one op. The op's schema and, by
default, its footprint follow from the signature of the torch implementation::

    @kernel(
        meta=lambda x: meta_like(x),
        cost=lambda x, residual, weight: Work(2 * nbytes(x, residual) + nbytes(weight)),
    )
    def add_rms_norm(x: Tensor, residual: Written, weight: Tensor, eps: float) -> Tensor: ...

A parameter may be a group: a NamedTuple, whose fields are arguments of the op in its place::

    def score_tokens(draw: Draw, ids: Tensor) -> ...      the implementation
    score_tokens(Tensor logits, ..., Tensor ids) -> ...   the op

``meta``, ``cost`` and ``footprint`` take the op's arguments that they name, or groups of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from importlib.util import find_spec
from math import prod
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor

from .arrays import array_of

T = TypeVar("T")
Op = Callable[..., T]  # an ``OpOverload``, with the type that the implementation returns

NAMESPACE = "schedbench"
INT32, INT64 = 4, 8  # bytes

_META = torch.device("meta")
_empty_strided = torch.empty_strided  # without the parameter that an emulated device adds
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")

Written = Annotated[Tensor, "written"]  # a tensor that an op changes
_WITHOUT_MARK: Mapping[Any, Any] = {
    Written: Tensor,
    Written | None: Tensor | None,
    Sequence[Written]: Sequence[Tensor],
}
_SCHEMA_TYPES: Mapping[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    Sequence[Tensor]: "Tensor[]",
    Sequence[int]: "int[]",
    int: "int",
    float: "float",
    bool: "bool",
    torch.dtype: "ScalarType",
}


class Signature:
    """``types`` are those of the op's arguments, by name and in order; ``written`` are names of arguments; ``groups``
    are classes by parameter."""

    def __init__(self, implementation: Callable[..., Any]) -> None:
        hints = get_type_hints(implementation, include_extras=True)
        self._implementation = implementation
        self.returns = hints.pop("return")
        self.groups = {name: hint for name, hint in hints.items() if hasattr(hint, "_fields")}
        self.types: dict[str, Any] = {}
        self.written: set[str] = set()
        for name, hint in hints.items():
            fields = get_type_hints(hint, include_extras=True) if name in self.groups else {name: hint}
            plain = {field: _WITHOUT_MARK.get(marked, marked) for field, marked in fields.items()}
            self.types |= plain
            self.written |= {field for field, marked in fields.items() if plain[field] != marked}

    def schema(self, name: str) -> str:
        """The op in torch's schema language. Raises TypeError for a type that it does not have."""
        arguments = []
        for place, (argument, hint) in enumerate(self.types.items()):
            kind = _schema_type(hint)
            if argument in self.written:
                kind = kind.replace("Tensor", f"Tensor(a{place}!)")
            arguments.append(f"{kind} {argument}")
        results = [] if self.returns is type(None) else get_args(self.returns) or [self.returns]
        returned = ", ".join(map(_schema_type, results))
        return f"{name}({', '.join(arguments)}) -> {returned if len(results) == 1 else f'({returned})'}"

    def bind(self, function: Callable[..., T]) -> Callable[..., T]:
        """A function of all the op's arguments, by position, that calls ``function`` with those that it names; a group
        is named like an argument. Raises TypeError for a parameter that the op does not have."""
        names = list(inspect.signature(function).parameters)
        if names == list(self.types):
            return function
        if unknown := set(names) - {*self.types, *self.groups}:
            raise TypeError(f"{self._implementation.__qualname__} has no parameters {sorted(unknown)}")
        fields = {name: ", ".join(group._fields) for name, group in self.groups.items()}
        given = ", ".join(f"{name}({fields[name]})" if name in fields else name for name in names)
        return self._compiled(f"function({given})", function=function, **self.groups)

    def accesses(self, rows: Mapping[str, str]) -> Callable[..., tuple[Access, ...]]:
        """The footprint of an op that reads all tensors but those that it writes, and then writes these. Lists are
        accessed as each of their tensors. ``rows`` names the argument with the indices along dim 0 of what is not
        accessed as a whole and, behind a comma, that with how much of each row is."""
        if unknown := {*rows, *(name for names in rows.values() for name in names.split(", "))} - set(
            self.types
        ):
            raise TypeError(f"{self._implementation.__qualname__} has no parameters {sorted(unknown)}")
        read: list[str] = []
        written: list[str] = []
        for name, hint in self.types.items():
            access = f"Access({{}}, {name in self.written}, {rows.get(name)})"
            accesses = {
                Tensor: access.format(name),
                Tensor | None: f"*([] if {name} is None else [{access.format(name)}])",
                Sequence[Tensor]: f"*[{access.format('each')} for each in {name}]",
            }
            if hint in accesses:
                (written if name in self.written else read).append(accesses[hint])
        return self._compiled(f"({', '.join([*read, *written, ''])})", Access=Access)

    def _compiled(self, expression: str, **names: Any) -> Callable[..., Any]:
        """A function of all the op's arguments. It is compiled, since a device asks for costs and footprints at every
        launch."""
        compiled: Callable[..., Any] = eval(f"lambda {', '.join(self.types)}: {expression}", names)
        return compiled


def _schema_type(hint: Any) -> str:
    if hint not in _SCHEMA_TYPES:
        raise TypeError(f"torch's schema language has no type for {hint}")
    return _SCHEMA_TYPES[hint]


Unit = Literal["memory", "gemm", "attention"]


class Work(NamedTuple):
    """What one launch asks of the hardware."""

    bytes: int  # device memory traffic, read and written
    flops: int = 0
    unit: Unit = "memory"  # which efficiency of the hardware profile applies
    host_bytes: int = 0  # pinned host memory read or written by the kernel: no memcpy counter sees it
    beside: bool = False  # moves bytes with so few multiprocessors that other streams' kernels run on


class Access(NamedTuple):
    """One tensor a launch reads or writes; ``rows``, of any shape, narrows it to indices along dim 0, ``lens`` [n] each
    of n rows to its first entries along dim 1. With a ``table`` these entries of the table are the indices."""

    tensor: Tensor
    write: bool
    rows: Tensor | None = None
    lens: Tensor | None = None
    table: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """An op and what is declared of it. All functions take the op's arguments by position.

    ``impl`` computes on real tensors; ``meta`` returns outputs of the right shape from arguments of any device,
    without running torch's own Meta kernels. ``cost`` is None for the emulator's own bookkeeping, which no real device
    would run and whose accesses are not watched. ``module`` is the name of the implementation's module, and of that in
    ``triton/`` which may have a launch function of the op's name, whose arguments at the positions ``dense`` are made
    contiguous first.
    """

    name: str
    op: torch._ops.OpOverload
    signature: Signature
    impl: Callable[..., Any]
    meta: Callable[..., Any]
    cost: Callable[..., Work] | None
    footprint: Callable[..., tuple[Access, ...]]
    unread_floats: bool  # only the shapes of floats are read: computed even where floats are skipped
    fixed_cost: bool  # cost depends on shapes only, not on values
    module: str
    dense: frozenset[int]


_KERNELS: dict[Op[Any], Kernel] = {}


def kernels() -> Mapping[Op[Any], Kernel]:
    """All kernels registered so far, by op."""
    return _KERNELS


def kernel(
    *,
    cost: Callable[..., Work] | None,
    meta: Callable[..., Tensor | tuple[Tensor, ...] | None] | None = None,
    footprint: Callable[..., tuple[Access, ...]] | None = None,
    rows: Mapping[str, str] = MappingProxyType({}),
    unread_floats: bool = False,
    fixed_cost: bool = True,
    strided: Collection[str] = (),
) -> Callable[[Callable[..., T]], Op[T]]:
    """Register the decorated torch implementation as an op of its name, a leading underscore left out.

    The name becomes the op itself, so that calling it goes through torch's dispatcher. Tensors that it writes to are
    ``Written`` in its signature. Without ``meta`` it returns nothing. Without ``footprint`` it has the accesses of
    ``Signature.accesses``. ``strided`` are the tensors that its launch function takes with gaps. For the rest see
    ``Kernel``. Raises TypeError where something names an argument that the op does not have.
    """

    def declare(implementation: Callable[..., T]) -> Op[T]:
        signature = Signature(implementation)
        name = implementation.__name__.lstrip("_")
        if (meta is None) != (signature.returns is type(None)):
            raise TypeError(f"{name} returns something exactly if its meta does")
        _LIBRARY.define(signature.schema(name))
        declared = Kernel(
            name,
            op=getattr(getattr(torch.ops, NAMESPACE), name).default,
            signature=signature,
            impl=signature.bind(implementation),
            meta=(lambda *_: None) if meta is None else signature.bind(meta),
            cost=None if cost is None else signature.bind(cost),
            footprint=signature.bind(footprint) if footprint else signature.accesses(rows),
            unread_floats=unread_floats,
            fixed_cost=fixed_cost,
            module=implementation.__module__.rpartition(".")[2],
            dense=frozenset(
                place
                for place, (argument, hint) in enumerate(signature.types.items())
                if hint in (Tensor, Tensor | None) and argument not in {*signature.written, *strided}
            ),
        )
        _LIBRARY.impl(name, declared.impl, "CPU")
        _LIBRARY.impl(name, on_cuda(declared), "CUDA")
        _LIBRARY.impl(name, declared.meta, "Meta")
        _KERNELS[declared.op] = declared
        return declared.op

    return declare


def meta_tensor(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """A contiguous tensor of ``shape`` on the meta device, made without running an op there."""
    return _empty_strided(shape, contiguous_strides(shape), dtype=dtype, device=_META)


def meta_tensors(count: int, *shape: int, dtype: torch.dtype = torch.int64) -> tuple[Tensor, ...]:
    """``count`` times ``meta_tensor``."""
    return tuple([meta_tensor(*shape, dtype=dtype) for _ in range(count)])


@lru_cache(maxsize=4096)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple([prod([max(size, 1) for size in shape[axis + 1 :]]) for axis in range(len(shape))])


def meta_like(tensor: Tensor) -> Tensor:
    """``meta_tensor`` of the same shape and dtype."""
    return meta_tensor(*tensor.shape, dtype=tensor.dtype)


def nbytes(*tensors: Tensor | None) -> int:
    """Bytes of all elements; those that are None count nothing."""
    total = 0
    for tensor in tensors:
        if tensor is not None:
            total += tensor.nbytes
    return total


def total_length(lens: Tensor) -> int:
    """The sum of lengths [b] in the host's memory. A list is added in less time than torch or NumPy need for few."""
    total: int = sum(array_of(lens).tolist())
    return total


def reads(*tensors: Tensor | None) -> tuple[Access, ...]:
    """Each tensor that is not None, read as a whole."""
    return tuple(Access(t, write=False) for t in tensors if t is not None)


def on_cuda(kernel: Kernel) -> Callable[..., Any]:
    """Returns a function that imports ``triton_kernel``'s module at its first call: Triton takes a second to import,
    and other devices do not need it. Without Triton or a launch function, and in float64, which serves as a reference,
    it runs the torch implementation."""

    @cache
    def fast() -> Callable[..., Any]:
        launch = None if find_spec("triton") is None else triton_kernel(kernel)
        return launch or kernel.impl

    def run(*args: Any) -> Any:
        double = isinstance(args[0], Tensor) and args[0].dtype == torch.float64
        return kernel.impl(*args) if double else fast()(*args)

    return run


def triton_kernel(kernel: Kernel) -> Callable[..., Any] | None:
    """Returns the launch function of the kernel's name in its module of ``triton/``, as a function of all the op's
    arguments; None where there is none. Those at the positions ``dense`` are made contiguous first, which costs nothing
    where they are already. Raises ImportError without Triton."""
    name = f"{__package__}.triton.{kernel.module}"
    function = getattr(import_module(name), kernel.name, None) if find_spec(name) else None
    if function is None:
        return None
    launch, dense = kernel.signature.bind(function), kernel.dense

    def run(*args: Any) -> Any:
        return launch(
            *(
                arg.contiguous() if place in dense and isinstance(arg, Tensor) else arg
                for place, arg in enumerate(args)
            )
        )

    return run
