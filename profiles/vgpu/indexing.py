"""Indexing by tensors, with the copies and syncs that it implies.

An index on the host is first copied to the device, which blocks. The host needs the number of a boolean mask's true
elements. Writing one host number through a mask is a fill and needs neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from . import torch_ops
from .cost import gathered, scattered
from .device import VirtualGpu
from .tensor import DeviceTensor, refuse_mixed, wrap
from .torch_ops import COUNT_BYTES, MASKS

_NO_KWARGS: Mapping[str, Any] = {}
_NONZERO = torch.ops.aten.nonzero.default._op


class IndexHandlers:
    def __init__(self, gpu: VirtualGpu) -> None:
        self._gpu = gpu

    def index(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DeviceTensor:  # noqa: ARG002
        source, indices = args
        if type(source) is not DeviceTensor:
            raise RuntimeError(
                f"indices should be either on {source.device} or on the same device as the indexed tensor "
                f"({source.device})"
            )
        held = (source.held, self._resolved(indices))
        out = self._gpu.executor.compute(torch_ops.index, held, _NO_KWARGS)
        self._launch("index", gathered(held, out), out)
        return wrap(out)

    def index_put_(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
        target, indices, values, *rest = args
        accumulate = bool(rest[0]) if rest else kwargs.get("accumulate", False)
        if type(target) is not DeviceTensor or (type(values) is not DeviceTensor and values.dim()):
            refuse_mixed(target.device if type(target) is not DeviceTensor else values.device)
        if type(values) is DeviceTensor:
            held = (target.held, self._resolved(indices), values.held, accumulate)
        else:
            mask = None if accumulate else self._only_mask(indices)
            if mask is not None:
                self._masked_fill(target.held, mask, values)
                return target
            held = (target.held, self._resolved(indices), self._uploaded(values), accumulate)
        self._gpu.executor.mutate(torch_ops.index_put_, held, _NO_KWARGS)
        self._launch("index_put_", scattered(held, target.held), target.held, *held[1])
        return target

    def _resolved(self, indices: Sequence[Any]) -> list[Any]:
        """The indices as held integer tensors; a mask of n dimensions becomes n of them."""
        resolved: list[Any] = []
        for index in indices:
            if index is None:
                resolved.append(None)
            elif type(index) is DeviceTensor:
                held = index.held
                resolved.extend(self._from_mask(held) if held.dtype in MASKS else [held])
            else:
                parts = index.nonzero().unbind(1) if index.dtype in MASKS else [index]
                resolved.extend(self._uploaded(part) for part in parts)
        return resolved

    def _from_mask(self, mask: torch.Tensor) -> Sequence[torch.Tensor]:
        self._launch("nonzero", mask.nbytes)
        self._gpu.runtime.copy("d2h", COUNT_BYTES, pinned=True, blocking=True)
        where: torch.Tensor = self._gpu.executor.read(_NONZERO, (mask,), {})
        return where.unbind(1)

    def _only_mask(self, indices: Sequence[Any]) -> torch.Tensor | None:
        """The mask, if it is the only index."""
        if len(indices) != 1 or type(indices[0]) is not DeviceTensor:
            return None
        held = indices[0].held
        return held if held.dtype in MASKS else None

    def _masked_fill(self, target: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> None:
        self._gpu.executor.mutate(_masked_fill, (target, mask, value.to(target.dtype, copy=True)), {})
        self._launch("masked_fill_", target.nbytes + mask.nbytes, target)

    def _uploaded(self, values: torch.Tensor) -> torch.Tensor:
        self._gpu.runtime.copy("h2d", values.nbytes, pinned=False, blocking=True)
        return values.clone()

    def _launch(self, name: str, size: int, *parts: torch.Tensor | None) -> None:
        """A kernel, unless one of the ``parts`` that it needs is empty."""
        runtime = self._gpu.runtime
        if all(part is None or part.numel() for part in parts):
            runtime.kernel(name, runtime.costs.memory(size))
        else:
            runtime.now += runtime.torch_call


def _masked_fill(target: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> None:
    target.masked_fill_(mask.bool().reshape(*mask.shape, *(1,) * (target.dim() - mask.dim())), value)
