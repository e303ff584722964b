"""Addresses of device memory: those of the host memory that holds the values, and made-up ones where values are not
computed. A program may give addresses to a kernel as numbers; the kernel then touches memory that is no argument."""

from __future__ import annotations

from typing import Final
from weakref import WeakValueDictionary

import torch

ALIGNMENT: Final = 512  # bytes, to which the allocator of CUDA aligns and rounds up blocks
UNCOMPUTED: Final = 1 << 60  # from here on addresses are made up: no address of a process is as high
# Attribute of a storage's Python object, which exists as long as the storage.
_ADDRESS: Final = "_vgpu_address"


def rounded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class AddressTable:
    """The addresses of one device."""

    def __init__(self) -> None:
        self._given: WeakValueDictionary[int, torch.UntypedStorage] = WeakValueDictionary()
        self._next = UNCOMPUTED

    def of(self, held: torch.Tensor) -> int:
        """The address of a tensor's values."""
        if not held.is_meta:
            return held.data_ptr()
        return self.base(held.untyped_storage()) + int(held.storage_offset()) * held.itemsize

    def give(self, storage: torch.UntypedStorage) -> int:
        """The address of a storage's first byte, for the program to use."""
        base = self.base(storage)
        self._given[base] = storage
        return base

    def base(self, storage: torch.UntypedStorage) -> int:
        """The address of a storage's first byte."""
        if storage.device.type != "meta":
            return storage.data_ptr()
        if not hasattr(storage, _ADDRESS):
            setattr(storage, _ADDRESS, self._next)
            self._next += rounded(storage.nbytes()) or ALIGNMENT
        found: int = getattr(storage, _ADDRESS)
        return found

    def given(self) -> list[torch.UntypedStorage]:
        """The storages whose address the program has asked for and which still exist."""
        return list(self._given.values())
