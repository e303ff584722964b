"""Copies between host and device, within the device, and to and from other devices, by CUDA's rules.

A non-blocking copy between two types moves the source's bytes and converts on the device; a blocking one converts on
the host. A side that is strided otherwise than the other one is copied through a contiguous temporary, which is never
pinned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .cost import nbytes
from .device import VirtualGpu
from .engine import EventRecording, PeerEventRecording, StreamQueue
from .executor import empty_strided
from .factories import new
from .tensor import DeviceTensor, is_pinned, pin, wrap
from .torch_ops import cat, clone, copy_

_is_dense = torch.ops.aten.is_non_overlapping_and_dense.default
_FORM = ("dtype", "memory_format")
_empty_like = torch.empty_like  # without the parameter that an emulated device adds


class CopyHandlers:
    def __init__(self, gpu: VirtualGpu) -> None:
        self._gpu = gpu
        self._device_type = gpu.device.type

    def copy_(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
        target, source, *rest = args
        self.copy(target, source, non_blocking=bool(rest[0]) if rest else kwargs.get("non_blocking", False))
        return target  # type: ignore[no-any-return]

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> None:
        if type(target) is not DeviceTensor:
            self._download(target, source, non_blocking=non_blocking, pinned=is_pinned(target))
        elif type(source) is not DeviceTensor:
            self._upload(target, source, non_blocking=non_blocking)
        else:
            self._gpu.executor.mutate(copy_, (target.held, source.held), {})
            self._within(target.held, source.held)

    def clone(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DeviceTensor:
        source = args[0].held
        result = self._gpu.executor.compute(clone, (source,), kwargs)
        self._within(result, source)
        return wrap(result)

    def concatenate(self, name: str, sources: Sequence[torch.Tensor], dim: int) -> DeviceTensor:
        """The tensors in new memory: a kernel for each 128 of them, or 64 if one is strided, where CUDA has one for
        all; otherwise a copy of each (ATen's Shape.cu)."""
        result, runtime = self._gpu.executor.compute(cat, (sources, dim), {}), self._gpu.runtime
        if not result.numel():
            runtime.now += runtime.torch_call
        elif len(sources) > 1 and result.dim() <= 4 and len({source.dtype for source in sources}) == 1:
            few = len(sources) <= 64
            most = 128 if few or all(source.is_contiguous() for source in sources) else 64
            call = runtime.torch_call
            for start in range(0, len(sources), most):
                if read := nbytes(sources[start : start + most]):
                    runtime.kernel(name, runtime.costs.memory(2 * read), call=call)
                    call = 0
        else:
            start = 0
            for source in sources:
                if source.numel():
                    self._within(result.narrow(dim, start, source.shape[dim]), source)
                    start += source.shape[dim]
        return wrap(result)

    def to_copy(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
        """``.to(...)`` of a device tensor: to the host, or to another type or format on the device."""
        source: DeviceTensor = args[0]
        device = kwargs.get("device")
        options = {name: kwargs[name] for name in _FORM if kwargs.get(name) is not None}
        if device is None or device.type == self._device_type:
            result = self._gpu.executor.compute(
                _converted, (source.held,), {"dtype": source.dtype, **options}
            )
            self._within(result, source.held)
            return wrap(result)
        if device.type == "meta":
            return torch.empty_like(source.held, device="meta", **options)
        target = _host_like(source.held, options)
        non_blocking = kwargs.get("non_blocking", False) and self._gpu.capabilities.pinned_memory
        if non_blocking:
            pin(target)
        self._download(target, source, non_blocking=non_blocking, pinned=non_blocking)
        return target

    def _upload(self, target: DeviceTensor, source: torch.Tensor, *, non_blocking: bool) -> None:
        held, runtime = target.held, self._gpu.runtime
        if held.numel():
            converts, one_block = held.dtype != source.dtype, _one_block(held, source)
            on_device = converts and non_blocking
            size = held.numel() * (source if on_device else held).itemsize
            direct = source.is_contiguous() and source.size() == held.size() and (on_device or not converts)
            pinned = (direct or one_block) and is_pinned(source)
            waits = runtime.copy("h2d", size, pinned=pinned, blocking=not non_blocking)
            if on_device or not (one_block or held.is_contiguous()):
                self._kernel(held, source)
            self._gpu.executor.upload(held, source, pinned=pinned, waits=waits)

    def _download(
        self, target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool, pinned: bool
    ) -> None:
        assert type(source) is DeviceTensor
        held, runtime = source.held, self._gpu.runtime
        if held.numel():
            converts, one_block = held.dtype != target.dtype, _one_block(target, held)
            on_device = converts and non_blocking
            pinned = pinned and (one_block or (target.is_contiguous() and (on_device or not converts)))
            if on_device or not (one_block or held.is_contiguous()):
                self._kernel(held, held)
            size = held.numel() * (target if on_device else held).itemsize
            waits = runtime.copy("d2h", size, pinned=pinned, blocking=not non_blocking)
            self._gpu.executor.download(target, held, waits=waits)

    def _within(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """A memcpy if both sides are one block in the same order, and nothing if these are the same memory, as in the
        assignment of ``x[:2] += 1``; otherwise a kernel."""
        size, runtime = target.nbytes, self._gpu.runtime
        if not size:
            return
        if _one_block(target, source):
            same = torch._C._is_alias_of(target, source)  # type: ignore[attr-defined]
            if same and target.storage_offset() == source.storage_offset():
                runtime.now += runtime.torch_call
                return
            runtime.copy_within(size)
        else:
            self._kernel(target, source)

    def _kernel(self, target: torch.Tensor, source: torch.Tensor) -> None:
        runtime = self._gpu.runtime
        runtime.kernel("copy_", runtime.costs.memory(target.nbytes + target.numel() * source.itemsize))


def _one_block(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether both are of one type and their elements lie without gaps in the same order (``is_contiguous`` of the
    iterator in ATen's Copy.cu)."""
    if target.dtype is not source.dtype or target.numel() != source.numel():
        return False
    if target.is_contiguous() or source.is_contiguous():
        return target.is_contiguous() and source.is_contiguous()
    return target.stride() == source.stride() and _is_dense(target)


def _host_like(held: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
    """Host memory for a copy of device memory, in its order unless that has gaps or another one is asked for."""
    if not options and not held.is_meta and held.is_contiguous():
        return _empty_like(held)
    if options or not held.is_contiguous():
        held = torch.empty_like(held, device="meta", **options)
    return empty_strided(held.size(), held.stride(), dtype=held.dtype)


def _converted(held: torch.Tensor, **options: Any) -> torch.Tensor:
    return held.to(**options, copy=True)


def send(
    gpu: VirtualGpu, queue: StreamQueue, tensors: Sequence[torch.Tensor], duration: int, *, name: str
) -> tuple[list[torch.Tensor], EventRecording]:
    """Send device tensors on a link's queue. Returns their values, which are read now, in program order, and the
    recording of when the last one has left. An adversary delays no work beyond the link."""
    runtime = gpu.runtime
    runtime.order_after_current(queue)
    values, size = [], 0
    for tensor in tensors:
        assert isinstance(tensor, DeviceTensor)
        held = tensor.held
        values.append(held if held.is_meta else gpu.executor.read(clone, (held,), {}))
        size += tensor.nbytes
        before, runtime.stream = runtime.stream, queue
        try:
            gpu.watcher.sent(tensor)
        finally:
            runtime.stream = before
    return values, runtime.send(queue, duration, size=size, name=name)


def receive(
    gpu: VirtualGpu, values: Sequence[torch.Tensor], arrival: PeerEventRecording | None
) -> tuple[torch.Tensor, ...]:
    """The values in memory of this device; the current stream waits for their arrival."""
    if arrival is not None:
        gpu.runtime.wait_peer_event(arrival)
    received = []
    for value in values:
        received.append(new(gpu, value.shape, value.stride(), value.dtype))
        land(gpu, received[-1], value)
    return tuple(received)


def land(gpu: VirtualGpu, tensor: DeviceTensor, value: torch.Tensor) -> None:
    """What another device has sent is in ``tensor`` for later work of the current stream."""
    gpu.executor.upload(tensor.held, value, pinned=False, waits=False)
    gpu.watcher.generated("receive", tensor)
