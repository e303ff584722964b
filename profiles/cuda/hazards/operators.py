"""Operators at torch's dispatch: what each reads and writes by its schema, and whether the host waits in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...vgpu.hazards import HazardChecker
from ...vgpu.hazards.ops import checked
from ...vgpu.hazards.records import IssuedOp
from ...vgpu.op_kinds import LIKES, Handler
from ..dispatch_counts import CopyRules, copies_of
from .order import ProgramOrder

# Kernels that fill new memory, by the factory's name without like or new. Other factories' kernels have their names.
_FILLS: Final = {
    "zeros": "zero_",
    "ones": "fill_",
    "full": "fill_",
    "scalar_tensor": "fill_",
    "rand": "uniform_",
    "randn": "normal_",
}
_UNSEEN: Final = frozenset({"record_stream", "is_pinned"})  # handled elsewhere, or without an access


class Operators(TorchDispatchMode):
    """Reports to the checker each operator of this thread that accesses the device, except for the checker's own."""

    def __init__(self, checker: HazardChecker, order: ProgramOrder, rules: CopyRules) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._checker = checker
        self._order = order
        self._rules = rules
        self._excluded = False
        self._handlers: dict[Any, Handler] = {}
        self._named: Mapping[str, Callable[[Any], Handler]] = {
            "copy_": self._copying,
            "_to_copy": self._moving,
            "clone": self._cloning,
            "lift_fresh": self._lifting,
        }

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Ignore the operators of this block, which are the tool's."""
        before, self._excluded = self._excluded, True
        try:
            yield
        finally:
            self._excluded = before

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:  # fmt: skip
        named = kwargs or {}
        if self._excluded:
            return func(*args, **named)
        self._order.sites.here()
        handler = self._handlers.get(func)
        if handler is None:
            handler = self._handlers[func] = self._handler(func)
        if any(map(self._on_device, args)) or any(map(self._on_device, named.values())):
            return handler(args, named)
        return self._without_operands(func, args, named)

    def _handler(self, func: Any) -> Handler:
        name = func._opname
        if name in _UNSEEN:
            return self._computing(func)
        if name in self._named:
            return self._named[name](func)
        handler = checked(self._checker, func, self._computing(func))
        return self._filling(name, handler) if name in LIKES else handler

    def _on_device(self, value: object) -> bool:
        if isinstance(value, (list, tuple)):
            return any(map(self._on_device, value))
        return self._checker.memory.on_device(value)

    def _computing(self, func: Any) -> Handler:
        def compute(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            out = func(*args, **kwargs)
            self._waiting(func, args, kwargs, out)
            return out

        return compute

    def _waiting(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        copies = copies_of(self._rules, func._opname, args, kwargs, out)
        if any(what.endswith(" blocking") for what, _ in copies):
            self._order.waited()

    # ---- new memory ----------------------------------------------------------------------------------------

    def _without_operands(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator without operands on the device: an upload, a factory, or one of the host."""
        if func._opname == "_to_copy":
            return self._handlers[func](args, kwargs)
        out = func(*args, **kwargs)
        if self._checker.memory.on_device(out):
            self._filled(func._opname, out)
        return out

    def _filling(self, name: str, handler: Handler) -> Handler:
        def fill(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            out = handler(args, kwargs)
            if self._checker.memory.on_device(out):
                self._filled(name, out)
            return out

        return fill

    def _filled(self, name: str, out: torch.Tensor) -> None:
        kind = name.removeprefix("new_").removesuffix("_like")
        if kind.startswith("empty"):
            self._checker.made(out)
        else:
            self._checker.generated(_FILLS.get(kind, name), out)

    # ---- copies --------------------------------------------------------------------------------------------

    def _copying(self, func: Any) -> Handler:
        def copy(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            checker, (target, source) = self._checker, args[:2]
            launch = self._launch(source, target)
            checker.copy_side(launch, source, write=False)
            if checker.memory.on_device(target):
                checker.announce(target)
            checker.copy_side(launch, target, write=True)
            return self._compute_at_work(func, args, kwargs)

        return copy

    def _moving(self, func: Any) -> Handler:
        def move(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            checker, source = self._checker, args[0]
            device = checker.memory.on_device(source)
            place = kwargs.get("device")
            if not device and (place is None or place.type != self._rules.type):
                return func(*args, **kwargs)  # from host to host
            name = "_to_copy" if device and place is None else "copy d2h" if device else "copy h2d"
            launch = checker.launch(name)
            checker.copy_side(launch, source, write=False)
            out = self._compute_at_work(func, args, kwargs)
            checker.copy_side(launch, out, write=True)
            return out

        return move

    def _cloning(self, func: Any) -> Handler:
        def clone(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            launch = self._checker.launch("clone")
            out = func(*args, **kwargs)
            self._checker.copy_side(launch, args[0], write=False)
            self._checker.copy_side(launch, out, write=True)
            return out

        return clone

    def _lifting(self, func: Any) -> Handler:
        """``torch.tensor(..., device=)``, whose values have been uploaded before this operator."""

        def lift(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            self._checker.copy_side(self._checker.launch("copy h2d"), args[0], write=True)
            out = func(*args, **kwargs)
            self._waiting(func, args, kwargs, out)
            return out

        return lift

    def _launch(self, source: torch.Tensor, target: torch.Tensor) -> IssuedOp:
        up, down = (not self._checker.memory.on_device(source), not self._checker.memory.on_device(target))
        return self._checker.launch("copy h2d" if up else "copy d2h" if down else "copy d2d")

    def _compute_at_work(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with self._checker.device_at_work():
            return self._computing(func)(args, kwargs)
