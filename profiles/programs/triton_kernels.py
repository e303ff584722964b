"""Triton kernels of a program: computed by Triton's interpreter on the values that the arguments hold, each one launch
with exactly the accesses that the interpreter made.

Triton decides by ``TRITON_INTERPRET`` when a kernel is decorated, so the variable has to be set before the program
imports Triton. Where values are not computed, tensors of floats have made-up addresses: loads from them give zeros and
stores to them are dropped, while both count as accesses. What the interpreter computes from such zeros is marked, and
may not be stored where values are computed. What programs query of Triton's driver about the GPU has the results of
``torch.cuda``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, Final

import numpy as np
import torch

from ...sched.kernels.declare import Work
from ..platform.machine import StorageAccess
from ..vgpu import custom
from ..vgpu.addresses import UNCOMPUTED, AddressTable, rounded
from ..vgpu.device import VirtualGpu
from ..vgpu.hazards.footprints import Offsets
from ..vgpu.patching import surrounded
from ..vgpu.tensor import DeviceTensor, is_pinned, is_pinned_storage
from .patches import patched_on_import

VARIABLE: Final = "TRITON_INTERPRET"
_LEAST: Final = np.iinfo(np.int64).min
Mask = np.ndarray[Any, np.dtype[np.bool_]]
Pointers = np.ndarray[Any, np.dtype[np.uint64]]
Operation = Callable[..., Any]


class TritonKernelError(RuntimeError):
    """A kernel touches memory that it must not touch, or needs values that are not computed."""


class KernelBoundsError(TritonKernelError):
    """A kernel touches memory of no tensor: an error of the program that launches it."""

    of_program = True


class UncomputedPointer:
    """Stands for a tensor without values among a kernel's arguments."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._address = address

    def data_ptr(self) -> int:
        return self._address


class VisitedMemory:
    """The memory that a kernel may touch, and what one computation of the kernel touches."""

    def __init__(self, kernel: str, storages: Mapping[int, torch.UntypedStorage]) -> None:
        self._kernel = kernel
        self._storages = [storages[base] for base in sorted(storages)]
        sizes = [storage.nbytes() for storage in self._storages]
        # Behind an empty one that comes before all addresses, so that every address is found in one.
        self._bases = np.array([_LEAST, *sorted(storages)], np.int64)
        self._ends = self._bases + np.array([0, *sizes], np.int64)
        self._slack = self._bases + np.array([0, *map(rounded, sizes)], np.int64)
        self._visits: dict[tuple[int, bool], list[Offsets]] = {}  # starts and ends
        self.uncomputed_loads = 0
        self.untraced = False  # such loads have gone into what is not followed

    def visit(self, pointers: Pointers, mask: Mask, item: int, *, write: bool, follows: bool = False) -> Mask:
        """Record an access to the items at ``pointers`` where ``mask`` is set; returns where values are there.
        ``follows``: the access or its value follows from loads that are not computed.

        The allocator of CUDA rounds sizes up, so that a kernel may read behind the end of a tensor. Raises
        KernelBoundsError for memory beyond that, and TritonKernelError where such a value is written to memory that is
        computed.
        """
        mask = np.broadcast_to(mask.astype(bool), pointers.shape)
        at = pointers.astype(np.int64)
        where = np.searchsorted(self._bases, at, side="right") - 1
        outside = mask & (at + item > self._slack[where])
        if outside.any():
            raise KernelBoundsError(
                f"{self._kernel} {'writes' if write else 'reads'} memory that belongs to no tensor of the virtual GPU "
                "that it was given"
            )
        inside = mask & (at + item <= self._ends[where])
        for storage in np.unique(where[inside]):
            chosen = at[inside & (where == storage)] - self._bases[storage]
            self._visits.setdefault((int(storage), write), []).append(np.stack((chosen, chosen + item)))
        uncomputed = inside & (at >= UNCOMPUTED)
        computed = inside & ~uncomputed
        if not write:
            self.uncomputed_loads += bool(uncomputed.any())
        elif (follows or self.untraced) and computed.any():
            raise TritonKernelError(
                f"values none: {self._kernel} reads floats that are not computed and writes values that follow"
            )
        return computed

    def accesses(self) -> list[StorageAccess]:
        return [
            StorageAccess(self._storages[storage - 1], *_joined(*np.concatenate(visits, axis=1)), write)
            for (storage, write), visits in self._visits.items()
        ]


class TritonKernel:
    """One launch of a Triton kernel, which has the memory that holds values in the place of device tensors. ``tensors``
    are those among its arguments."""

    def __init__(
        self,
        name: str,
        compute: Callable[..., None],
        addresses: AddressTable,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        """``compute`` receives the memory that the kernel may touch, and the arguments."""
        self.name = name
        self.tensors: list[torch.Tensor] = []
        self._compute = compute
        self._addresses = addresses
        self._arguments: list[torch.UntypedStorage] = []
        self._args = [self._held(arg) for arg in args]
        self._kwargs = {name: self._held(arg) for name, arg in kwargs.items()}
        self._memory: VisitedMemory | None = None

    def storages(self) -> list[torch.UntypedStorage]:
        return [*self._arguments, *self._addresses.given()]

    def run(self) -> None:
        self._memory = VisitedMemory(
            self.name, {self._addresses.base(s): s for s in self.storages() if s.nbytes()}
        )
        self._compute(self._memory, *self._args, **self._kwargs)

    def accesses(self) -> list[StorageAccess]:
        return [] if self._memory is None else self._memory.accesses()

    def cost(self) -> Work:
        """Every byte that is read or written moves once."""
        device = host = 0
        for storage, starts, ends, _ in self.accesses():
            size = int((ends - starts).sum())
            device, host = (device, host + size) if is_pinned_storage(storage) else (device + size, host)
        return Work(bytes=device, host_bytes=host)

    def _held(self, arg: Any) -> Any:
        if isinstance(arg, torch.Tensor):
            return self._of_tensor(arg)
        if isinstance(arg, tuple):
            parts = map(self._held, arg)
            return type(arg)(*parts) if hasattr(arg, "_fields") else tuple(parts)
        if isinstance(getattr(arg, "base", None), torch.Tensor):  # a descriptor, or a tensor of another type
            changed = copy.copy(arg)
            changed.base = self._held(arg.base)
            return changed
        return arg

    def _of_tensor(self, tensor: torch.Tensor) -> Any:
        """Raises ValueError for a host tensor that is not pinned, as Triton does."""
        held = tensor.held if type(tensor) is DeviceTensor else tensor
        if held is tensor and not is_pinned(tensor):
            raise ValueError(
                "a Triton kernel cannot access pageable memory of the host: the argument is a CPU tensor"
            )
        self.tensors.append(tensor)
        self._arguments.append(held.untyped_storage())
        return UncomputedPointer(self._addresses.of(held), held.dtype) if held.is_meta else held


class TritonPrograms:
    """``autotuned`` has the kernels for which a configuration was chosen without trying them out."""

    def __init__(self, gpu: VirtualGpu) -> None:
        self.autotuned: set[str] = set()
        self._gpu = gpu
        self._memory: VisitedMemory | None = None  # of the kernel that is being computed

    def notes(self) -> list[str]:
        """The notes of a result about the kernels."""
        return [f"triton.autotune took the first configuration of {name}" for name in sorted(self.autotuned)]

    def patches(self, interpreter: Any) -> Iterator[tuple[Any, str, Any]]:
        """Of Triton's module ``runtime.interpreter``."""
        yield interpreter, "InterpretedFunction", _as_compiled(interpreter.InterpretedFunction)
        builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
        launch = partial(self._launch, interpreter.InterpreterError)
        yield executor, "__call__", surrounded(executor.__call__, launch)
        accesses: dict[str, Operation] = {
            "create_masked_load": self._load,
            "create_masked_store": self._store,
            "create_atomic_rmw": self._atomic,
            "create_atomic_cas": self._compare_and_swap,
        }
        for name, method in list(vars(builder).items()):
            if callable(method) and not name.startswith("_"):
                access = surrounded(method, accesses[name]) if name in accesses else method
                yield builder, name, surrounded(access, self._follow)
        reduced = interpreter.ReduceScanOpInterface
        yield reduced, "apply", surrounded(reduced.apply, self._read)
        scalars = surrounded(interpreter._patch_lang_tensor, self._patch_tensor)
        yield interpreter, "_patch_lang_tensor", scalars
        tuner = import_module("triton.runtime.autotuner").Autotuner

        def bench(tuned: Any, *args: Any, **kwargs: Any) -> list[float]:  # noqa: ARG001
            self.autotuned.add(tuned.base_fn.__name__)
            return [0.0, 0.0, 0.0]

        yield tuner, "_bench", bench

    def _launch(
        self, failed: type[Exception], compute: Operation, executor: Any, /, *args: Any, **kwargs: Any
    ) -> None:
        # The interpreter copies arguments to the host and back, which here are there already.
        executor._init_args_hst = lambda *arguments: arguments
        executor._restore_args_dev = lambda *_: None

        def run(memory: VisitedMemory, /, *held: Any, **named: Any) -> None:
            self._memory = memory
            try:
                compute(executor, *held, **named)
            except failed as error:
                cause: BaseException | None = error
                while isinstance(cause, failed):  # one for each function of the kernel
                    cause = cause.__cause__
                if isinstance(cause, TritonKernelError):
                    raise cause from None
                raise
            finally:
                self._memory = None

        kernel = TritonKernel(executor.fn.__name__, run, self._gpu.addresses, args, kwargs)
        tensors, kernel.tensors = kernel.tensors, []
        custom.launch_interpreted(kernel, tensors)

    def _visit(self, pointers: Any, mask: Any, *values: Any, write: bool) -> Any:
        """The mask of the items whose values are there. ``values`` are those that are stored. In Triton 3.8 the mask of
        a descriptor's items is an array."""
        if self._memory is None:
            return mask
        item = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        follows = _follows([pointers, mask, *values])
        seen = self._memory.visit(pointers.data, np.asarray(mask.data), item, write=write, follows=follows)
        return seen if isinstance(mask, np.ndarray) else type(mask)(seen, mask.dtype)

    def _follow(self, operation: Operation, builder: Any, *args: Any, **kwargs: Any) -> Any:
        """Mark the result of an operation of the interpreter that loads what is not computed, or follows from it."""
        memory = self._memory
        if memory is None:
            return operation(builder, *args, **kwargs)
        before = memory.uncomputed_loads
        result = operation(builder, *args, **kwargs)
        if memory.uncomputed_loads != before or (before and _follows([*args, *kwargs.values()])):
            for part in result if isinstance(result, (list, tuple)) else [result]:
                if hasattr(part, "data"):
                    part.follows_uncomputed = True
        return result

    def _read(self, read: Operation, *given: Any) -> Any:
        """What is read of the last argument is not followed. Reductions and scans may have several tensors in it."""
        tensors = given[-1] if isinstance(given[-1], tuple) else given[-1:]
        if self._memory is not None and _follows([tensor.handle for tensor in tensors]):
            self._memory.untraced = True
        return read(*given)

    def _patch_tensor(self, patch: Operation, tensor: Any, scope: Any) -> None:
        """What a kernel decides by a value of a tensor is not followed, and neither is a tensor's transposition."""
        patch(tensor, scope)
        for name in ("__index__", "__bool__"):
            scope.set_attr(tensor, name, surrounded(getattr(tensor, name), self._read))
        scope.set_attr(tensor, "T", property(surrounded(tensor.T.fget, self._read)))

    def _load(self, load: Operation, builder: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        return load(builder, pointers, self._visit(pointers, mask, write=False), *rest, **named)

    def _store(
        self, store: Operation, builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **named: Any
    ) -> Any:
        seen = self._visit(pointers, mask, value, write=True)
        return store(builder, pointers, value, seen, *rest, **named)

    def _atomic(
        self, rmw: Operation, builder: Any, op: Any, pointers: Any, value: Any, mask: Any, *rest: Any
    ) -> Any:
        """An atomic operation counts as a write. It returns zeros where no values are."""
        seen = self._visit(pointers, mask, value, write=True)
        found = rmw(builder, op, pointers, value, seen, *rest)
        return type(found)(np.where(seen.data, found.data, np.zeros_like(found.data)), found.dtype)

    def _compare_and_swap(
        self, cas: Operation, builder: Any, pointers: Any, expected: Any, value: Any, *rest: Any
    ) -> Any:
        """Where no values are, the comparison fails and returns what it was compared with."""
        every = type(expected)(np.ones(pointers.data.shape, np.bool_), expected.dtype)
        if not self._visit(pointers, every, expected, value, write=True).data.all():
            return expected
        return cas(builder, pointers, expected, value, *rest)


@contextmanager
def triton_interpreted(gpu: VirtualGpu) -> Iterator[TritonPrograms]:
    """Launch the Triton kernels of a program on ``gpu`` until the block ends."""
    programs = TritonPrograms(gpu)
    with (
        patched_on_import("triton.runtime.interpreter", programs.patches),
        patched_on_import(
            "triton.runtime.driver", lambda module: [(module.driver, "_active", TritonDriver())]
        ),
    ):
        yield programs


def _follows(values: Iterable[Any]) -> bool:
    """Whether one of the interpreter's values, or of those in a list, follows from loads that are not computed."""
    return any(
        # Triton's tuples in a kernel have no attributes but their fields.
        _follows(value)
        if isinstance(value, (list, tuple))
        else "follows_uncomputed" in getattr(value, "__dict__", ())
        for value in values
    )


def _as_compiled(kind: type) -> type:
    """``kind``, Triton's class of interpreted kernels, whose instances pass for kernels that are compiled."""
    compiled = import_module("triton.runtime.jit").JITFunction
    return type(kind.__name__, (kind,), {"__class__": property(lambda _: compiled)})


def _joined(starts: Offsets, ends: Offsets) -> tuple[Offsets, Offsets]:
    """The union of intervals."""
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    first = np.flatnonzero(np.append(True, starts[1:] > ends[:-1]))
    return starts[first], ends[np.append(first[1:] - 1, len(ends) - 1)]


class TritonDriver:
    """Stands for Triton's active driver, which there is none of without a GPU."""

    def __init__(self) -> None:
        self.utils = self

    def get_current_target(self) -> Any:
        major, minor = torch.cuda.get_device_capability()
        target: Any = import_module("triton.backends.compiler").GPUTarget
        return target("cuda", 10 * major + minor, torch.cuda.get_device_properties(0).warp_size)

    def get_device_properties(self, device: int = 0) -> dict[str, int]:
        properties: Any = torch.cuda.get_device_properties(device)
        return {
            "max_num_regs": properties.regs_per_multiprocessor,
            "max_shared_mem": properties.shared_memory_per_block_optin,
            "multiprocessor_count": properties.multi_processor_count,
            "warpSize": properties.warp_size,
        }

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:  # noqa: ARG002
        return torch.cuda.current_stream().cuda_stream

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        return torch.cuda
