"""Counts of copies and syncs from inside the process, at torch's dispatch, by the rules of torch's source.

``schedbench verify`` calls them the announced counts, and compares them with CUPTI's records and with the virtual
GPU's prediction. Every operator is seen with its operands and its result. Not seen are kernels, the nodes of replayed
graphs, and what a custom op does inside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeGuard

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...sched.observe import Observer, StepInfo
from ..record.timeline import Site
from ..vgpu.patching import Function, Target, replaced
from ..vgpu.sites import Sites
from ..vgpu.torch_ops import COUNT_BYTES, READS
from .calls import EventStreams, sync_calls

STREAM_SYNC: Final = "cudaStreamSynchronize"
_MASKS: Final = frozenset((torch.bool, torch.uint8))
_INDEXED: Final = frozenset(("index", "index_put_", "index_put"))
_READ: Final = "d2h pinned blocking"  # a single number, which torch reads through a pinned buffer

OpCopies = Iterator[tuple[str, int]]  # (what, bytes)


@dataclass(frozen=True, slots=True)
class CopyRules:
    """The copies of operators. ``type`` is the device's; ``inline`` is the most bytes that a pageable upload may have
    without waiting."""

    type: str
    inline: int

    def on_device(self, value: object) -> TypeGuard[torch.Tensor]:
        return isinstance(value, torch.Tensor) and value.device.type == self.type

    def copies(self, op: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> OpCopies:
        """The copies of an operator between host and device."""
        if op == "_to_copy":
            yield from self._transfer(result, args[0], non_blocking=bool(kwargs.get("non_blocking")))
        elif op == "copy_":
            non_blocking = bool(args[2]) if len(args) > 2 else bool(kwargs.get("non_blocking"))
            yield from self._transfer(args[0], args[1], non_blocking=non_blocking)
        elif op == "_local_scalar_dense" and self.on_device(args[0]):
            yield _READ, args[0].itemsize
        elif op == "lift_fresh" and self.on_device(args[0]) and args[0].numel():
            yield "h2d pageable blocking", args[0].nbytes  # torch.tensor(..., device=): made on the host
        elif op in READS and any(map(self.on_device, args)) and kwargs.get("output_size") is None:
            yield from ((_READ, size) for size in READS[op])
        elif op in _INDEXED and self.on_device(args[0]):
            yield from self._indices(op, args)

    def _transfer(self, target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool) -> OpCopies:
        up, down = self.on_device(target), self.on_device(source)
        if up == down or not target.numel():
            return
        converts = target.dtype != source.dtype
        host, device = (source, target) if up else (target, source)
        direct = host.is_contiguous() and (non_blocking or not converts) and host.size() == device.size()
        pinned = direct and host.is_pinned()
        # Converted on the device, the source's bytes go up, or the target's come down; on the host, the reverse.
        on_device = converts and non_blocking
        carried = (source if on_device else target) if up else (target if on_device else source)
        size = target.numel() * carried.itemsize
        waits = not pinned and (not up or size > self.inline)
        memory, blocking = "pinned" if pinned else "pageable", " blocking" * (waits or not non_blocking)
        yield f"{'h2d' if up else 'd2h'} {memory}{blocking}", size

    def _indices(self, op: str, args: Sequence[Any]) -> OpCopies:
        """A mask's elements are counted on the host, except for a fill with one value. Indices of the host are
        uploaded."""
        fills = op != "index" and len(args[1]) == 1 and args[2].numel() == 1
        for index in args[1]:
            if index is None:
                continue
            if not self.on_device(index):
                yield "h2d pageable blocking", index.nbytes
            elif index.dtype in _MASKS and not fills:
                yield _READ, COUNT_BYTES
        if op != "index" and not self.on_device(args[2]) and not fills:
            yield "h2d pageable blocking", args[2].nbytes

    def driver_waits(self, what: str, size: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether the driver itself waits in the call, so that torch makes no sync."""
        non_blocking = bool(kwargs.get("non_blocking")) or (len(args) > 2 and args[2] is True)
        return non_blocking and (
            what.startswith("d2h pageable") or (what.startswith("h2d pageable") and size > self.inline)
        )


class DispatchCount(NamedTuple):
    """``what`` is as in ``lab.single_run.CountedLine``; ``stream`` is torch's id of it."""

    step: int
    range: str
    stream: int
    site: int
    what: str


class DispatchCounter(TorchDispatchMode, Observer):
    """An observer that counts while it is ``installed``. ``kinds`` are the launched steps' kinds."""

    def __init__(self, module: Any, device_type: str, sites: Sites, *, inline: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[DispatchCount] = Counter()
        self.bytes: Counter[DispatchCount] = Counter()
        self.kinds: dict[int, str] = {}
        self.rules = CopyRules(device_type, inline)
        self._module = module
        self._sites = sites
        self._open: list[tuple[str, int]] = [("", -1)]
        self._events = EventStreams(self._number)

    @property
    def sites(self) -> Sequence[Site]:
        return self._sites.resolved()

    @contextmanager
    def range(self, name: str, step: int, size: int) -> Iterator[None]:  # noqa: ARG002
        self._open.append((name, step))
        try:
            yield
        finally:
            self._open.pop()

    def launched(self, info: StepInfo) -> None:
        self.kinds[info.step] = info.kind

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Count the operators and waits of this thread in this block."""
        event = self._module.Event
        with (
            replaced(sync_calls(self._module), self._waiting),
            replaced([Target(event, "record", "cudaEventRecord")], self._events.recording),
            self,
        ):
            yield

    def count(self, what: str, size: int = 0, stream: int | None = None) -> None:
        name, step = self._open[-1]
        where = self._number(None) if stream is None else stream
        key = DispatchCount(step, name, where, self._sites.here(2), what)
        self.counts[key] += 1
        self.bytes[key] += size

    def _number(self, stream: Any) -> int:
        return int((self._module.current_stream() if stream is None else stream).stream_id)

    def _waiting(self, target: Target, function: Function) -> Function:
        def waiting(*args: Any, **kwargs: Any) -> Any:
            self.count(target.call, stream=self._awaited(args))
            return function(*args, **kwargs)

        return waiting

    def _awaited(self, args: Sequence[Any]) -> int | None:
        """The stream that a call waits for: itself, or the one that an event was recorded on."""
        if args and hasattr(args[0], "stream_id"):
            return int(args[0].stream_id)
        return self._events.of(args[0]) if args else None

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:  # fmt: skip
        named = kwargs or {}
        result = func(*args, **named)
        for what, size in self.rules.copies(func._opname, args, named, result):
            self.count(what, size)
            if what.endswith(" blocking") and not self.rules.driver_waits(what, size, args, named):
                self.count(STREAM_SYNC)
        return result
