"""Freed memory goes to its next owner at once, and what that one writes is seen by whoever still reads the old values.

As in the real allocator a block belongs to the stream that it was allocated on and is re-issued there; as among the
hazards, where the heap's layout would decide who gets it, the worst is assumed: everybody who allocates does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from ..handlers import Handler, Handlers
from ..tensor import DeviceTensor
from ..watcher import Watcher
from .executor import poisoned
from .order import DeferredTask

if TYPE_CHECKING:
    from ..gpu import VirtualGpu
    from .runtime import DeferredRuntime

_BLOCK = "_vgpu_issued"  # on a storage's Python object, which lives as long as the storage


class Issued:
    """Device memory while somebody can still reach it. Work that is yet to be done holds its storage, not this."""

    __slots__ = ("__weakref__", "_reuse", "storage", "stream")

    def __init__(self, storage: torch.UntypedStorage, stream: int, reuse: Reuse) -> None:
        self.storage = ref(storage)
        self.stream = stream
        self._reuse: Reuse | None = reuse

    def keep(self) -> None:
        """Never re-issue it."""
        self._reuse = None

    def __del__(self) -> None:
        if self._reuse is not None:
            self._reuse.freed(self)


class Reuse(Watcher):
    """Follows memory from its allocation to its end."""

    def __init__(self, runtime: DeferredRuntime) -> None:
        self._runtime = runtime
        self._free: dict[int, list[ref[torch.UntypedStorage]]] = {}
        self._capturing = False
        self._open = True

    def made(self, tensor: torch.Tensor) -> None:
        assert isinstance(tensor, DeviceTensor)
        storage = tensor.held.untyped_storage()
        known: ref[Issued] | None = getattr(storage, _BLOCK, None)
        block = known() if known is not None else None
        if block is None:
            block = self._issue(storage)
        tensor.issued = block

    def generated(self, op: str, tensor: torch.Tensor) -> None:  # noqa: ARG002
        self.made(tensor)

    def record_stream(self, tensor: torch.Tensor, queue: int) -> None:  # noqa: ARG002
        """Waiting for the streams named is one way of doing it; never is another."""
        assert isinstance(tensor, DeviceTensor)
        self.made(tensor)
        tensor.issued.keep()

    def capturing(self, capture: object | None) -> None:
        """A graph's own memory is never re-issued."""
        self._capturing = capture is not None

    def freed(self, block: Issued) -> None:
        storage = block.storage()
        if storage is not None:  # work that is yet to be done holds it
            self._free.setdefault(block.stream, []).append(block.storage)

    def _issue(self, storage: torch.UntypedStorage) -> Issued:
        stream = self._runtime.stream.id
        for freed in self._free.pop(stream, ()):
            self._scribble(stream, freed())
        block = Issued(storage, stream, self)
        if self._capturing:
            block.keep()
        setattr(storage, _BLOCK, ref(block))
        return block

    def _scribble(self, stream: int, storage: torch.UntypedStorage | None) -> None:
        """The new owner's first write, over what the last one's readers may not have read yet."""
        if storage is not None and storage.nbytes() and storage.device.type != "meta":
            task = DeferredTask(partial(_overwrite, storage), lambda: "a new owner's first write")
            self._runtime.order.launch(stream, task)


class ReusingHandlers(Handlers):
    """Every op's results are followed."""

    def __init__(self, gpu: VirtualGpu, reuse: Reuse) -> None:
        super().__init__(gpu)
        self._reuse = reuse

    def build(self, func: torch._ops.OpOverload) -> Handler:
        handler = self[func] = _followed(super().build(func), self._reuse.made)
        return handler


def _followed(handler: Handler, made: Callable[[DeviceTensor], None]) -> Handler:
    def following(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        out = handler(args, kwargs)
        for tensor in out if isinstance(out, (list, tuple)) else (out,):
            if type(tensor) is DeviceTensor:
                made(tensor)
        return out

    return following


def _overwrite(storage: torch.UntypedStorage) -> None:
    size = storage.nbytes()
    kind = torch.int32 if size % 4 == 0 else torch.uint8
    poisoned(torch.empty(0, dtype=kind).set_(storage))
