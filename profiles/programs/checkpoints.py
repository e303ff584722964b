"""``torch.save`` and ``torch.load`` with tensors on the virtual GPU, which a file names as those of ``cuda:0``.

As on CUDA, the memory of tensors that share it is copied as a whole and once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.storage import TypedStorage

from ..vgpu.patching import attributes_set
from ..vgpu.tensor import DeviceTensor
from .cuda_program import CUDA, CudaDeviceNames


def saved(original: Callable[..., None]) -> Callable[..., None]:
    def save(*args: Any, **options: Any) -> None:
        copies: dict[int, TypedStorage] = {}

        def reduced(tensor: DeviceTensor, protocol: Any) -> Any:  # noqa: ARG001
            hooks: Any = OrderedDict()
            if getattr(tensor, "_is_param", False):
                return torch._utils._rebuild_parameter, (tensor.data, tensor.requires_grad, hooks)
            held, number = tensor.held, tensor.held.untyped_storage()._cdata
            if number not in copies:
                size = held.untyped_storage().nbytes() // held.itemsize
                memory = tensor.detach().as_strided((size,), (1,), 0).cpu().untyped_storage()
                copies[number] = TypedStorage(wrap_storage=memory, dtype=held.dtype, _internal=True)
                copies[number]._fake_device = CUDA  # the location that torch writes
            form = held.storage_offset(), held.size(), held.stride(), tensor.requires_grad, hooks
            return torch._utils._rebuild_tensor_v2, (copies[number], *form)

        with attributes_set([(DeviceTensor, "__reduce_ex__", reduced)]):
            original(*args, **options)

    return save


def loaded(original: Callable[..., Any], names: CudaDeviceNames) -> Callable[..., Any]:
    rebuild: Any = torch._utils._rebuild_tensor

    def load(f: Any, map_location: Any = None, *args: Any, **options: Any) -> Any:
        """The file or ``map_location`` puts a tensor on the virtual GPU. Some files have their values at the end."""
        found, copies = set[int](), dict[int, tuple[torch.Tensor, torch.Tensor]]()

        def place(storage: torch.UntypedStorage, location: str) -> Any:
            mapped = map_location.get(location) if isinstance(map_location, dict) else map_location
            target = location if mapped is None else mapped
            if names.placed(target) is target:
                return torch.serialization.default_restore_location(storage, str(target))
            found.add(storage._cdata)
            return storage

        def rebuilt(storage: TypedStorage, offset: int, size: Any, stride: Any) -> Any:
            tensor = rebuild(storage, offset, size, stride)
            number = tensor.untyped_storage()._cdata
            if number not in found:
                return tensor
            if number not in copies:
                whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
                copies[number] = whole, torch.empty_like(whole, device=names.placed(CUDA))
            return copies[number][1].as_strided(size, stride, offset)

        with attributes_set([(torch._utils, "_rebuild_tensor", rebuilt)]), torch.no_grad():
            made = original(f, map_location if callable(map_location) else place, *args, **options)
            for whole, copy in copies.values():
                copy.copy_(whole)
        return made

    return load
