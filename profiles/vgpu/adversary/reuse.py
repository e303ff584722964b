"""Issues freed memory to its next owner at once, so that reads of the old values see the new owner's first write.

As in the real allocator, a block belongs to the stream that it was allocated on and is issued again there. Where the
heap's layout would decide the next owner, the worst case is assumed, as in the hazard checker: the next allocation of
any size takes all freed blocks of its stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from weakref import finalize, ref

import torch

from ...platform.machine import Watcher
from ..tensor import DeviceTensor, is_pinned_storage
from ..torch_ops import Handler
from .executor import DeferredRuntime, poisoned
from .order import DeferredTask

_BLOCK = "_vgpu_issued"  # attribute of a storage's Python object, which exists as long as the storage


class IssuedBlock:
    """Device memory for as long as a tensor reaches it. Pending work keeps the storage alive, but not this block."""

    __slots__ = ("__weakref__", "end")
    end: finalize[[ref[torch.UntypedStorage], int], IssuedBlock]  # issues the memory again


class BlockReuse(Watcher):
    """Follows device memory from its allocation to its end."""

    def __init__(self, runtime: DeferredRuntime) -> None:
        self._runtime = runtime
        self._free: dict[int, list[ref[torch.UntypedStorage]]] = {}
        self._is_capturing = False

    def following(self, handler: Handler) -> Handler:
        """The handler, whose results are followed."""

        def follow(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            out = handler(args, kwargs)
            for tensor in out if isinstance(out, (list, tuple)) else (out,):
                if type(tensor) is DeviceTensor:
                    self._block(tensor)
            return out

        return follow

    def made(self, tensor: torch.Tensor) -> None:
        self._block(tensor)

    def generated(self, op: str, tensor: torch.Tensor) -> None:  # noqa: ARG002
        self._block(tensor)

    def record_stream(self, tensor: torch.Tensor, queue: int) -> None:  # noqa: ARG002
        """Never issuing the block again satisfies the call."""
        self._block(tensor).end.detach()

    def capturing(self, capture: object | None) -> None:
        """A graph's own memory is never issued again."""
        self._is_capturing = capture is not None

    def _freed(self, storage: ref[torch.UntypedStorage], stream: int) -> None:
        if storage() is not None:  # pending work keeps it alive
            self._free.setdefault(stream, []).append(storage)

    def _block(self, tensor: torch.Tensor) -> IssuedBlock:
        assert isinstance(tensor, DeviceTensor)
        storage = tensor.held.untyped_storage()
        known: ref[IssuedBlock] | None = getattr(storage, _BLOCK, None)
        block = (known() if known is not None else None) or self._issue(storage)
        tensor.block = block
        return block

    def _issue(self, storage: torch.UntypedStorage) -> IssuedBlock:
        stream = self._runtime.stream.id
        mapped = is_pinned_storage(storage)  # memory of the host, which kernels access by its address
        for freed in () if mapped else self._free.pop(stream, ()):
            self._overwrite(stream, freed())
        block = IssuedBlock()
        block.end = finalize(block, self._freed, ref(storage), stream)
        if self._is_capturing or mapped:
            block.end.detach()
        setattr(storage, _BLOCK, ref(block))
        return block

    def _overwrite(self, stream: int, storage: torch.UntypedStorage | None) -> None:
        """The new owner's first write, over values that may have pending reads."""
        if storage is not None and storage.nbytes() and storage.device.type != "meta":
            task = DeferredTask(partial(_poison, storage), lambda: "a new owner's first write")
            self._runtime.order.launch(stream, task)


def _poison(storage: torch.UntypedStorage) -> None:
    size = storage.nbytes()
    dtype = torch.int32 if size % 4 == 0 else torch.uint8
    poisoned(torch.empty(0, dtype=dtype).set_(storage))
