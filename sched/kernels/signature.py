"""Reads the Python signature of a kernel's implementation: its op's schema, and the position of each argument.

A parameter may be a group: a NamedTuple, whose fields are arguments of the op in its place::

    def score_tokens(draw: Draw, ids: Tensor) -> ...      the implementation
    score_tokens(Tensor logits, ..., Tensor ids) -> ...   the op
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor

T = TypeVar("T")

_TENSORS = (Tensor, Tensor | None)
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
    """``types`` are those of the op's arguments, by name and in order; ``groups`` are classes by parameter."""

    def __init__(self, implementation: Callable[..., Any]) -> None:
        hints = get_type_hints(implementation)
        self._implementation = implementation
        self.returns = hints.pop("return")
        self.groups = {name: hint for name, hint in hints.items() if hasattr(hint, "_fields")}
        self.types: dict[str, Any] = {}
        for name, hint in hints.items():
            self.types |= get_type_hints(hint) if name in self.groups else {name: hint}

    def schema(self, name: str, mutates: Collection[str]) -> str:
        """The op in torch's schema language. Raises TypeError for a type that it does not have, and for a name in
        ``mutates`` that is no argument."""
        if unknown := set(mutates) - set(self.types):
            raise TypeError(f"{name} has no arguments {sorted(unknown)} to mutate")
        arguments = []
        for place, (argument, hint) in enumerate(self.types.items()):
            kind = _schema_type(hint)
            if argument in mutates:
                kind = kind.replace("Tensor", f"Tensor(a{place}!)")
            arguments.append(f"{kind} {argument}")
        results = [] if self.returns is type(None) else get_args(self.returns) or [self.returns]
        returned = ", ".join(map(_schema_type, results))
        return f"{name}({', '.join(arguments)}) -> {returned if len(results) == 1 else f'({returned})'}"

    def tensors(self) -> list[str]:
        """Names of the arguments that are one tensor, or may be."""
        return [name for name, hint in self.types.items() if hint in _TENSORS]

    def places(self, names: Collection[str]) -> tuple[int, ...]:
        return tuple(place for place, name in enumerate(self.types) if name in names)

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
        # Compiled once, since a device asks for costs and footprints at every launch.
        source = f"lambda {', '.join(self.types)}: function({given})"
        bound: Callable[..., T] = eval(source, {"function": function, **self.groups})
        return bound


def _schema_type(hint: Any) -> str:
    if hint not in _SCHEMA_TYPES:
        raise TypeError(f"torch's schema language has no type for {hint}")
    return _SCHEMA_TYPES[hint]
