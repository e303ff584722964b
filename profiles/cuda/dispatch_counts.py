"""Counts from inside the process: the copies and syncs that torch's calls announce, by the rules of its source.

A second opinion beside CUPTI's records and the virtual GPU's: it sees every operator with its operands and result,
and knows nothing of what the driver makes of it. Not seen are kernels, the nodes of replayed graphs, and what an
operator of ours does inside itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...sched.observe import Silence, StepInfo
from ..record.timeline import Site
from ..vgpu.reads import COUNT_BYTES, READS
from ..vgpu.sites import Sites
from .blocking_calls import syncs
from .patching import Function, Target, replaced

STREAM_SYNC: Final = "cudaStreamSynchronize"
_MASKS: Final = frozenset((torch.bool, torch.uint8))
_INDEXED: Final = frozenset(("index", "index_put_", "index_put"))
_READ: Final = "d2h pinned blocking"  # of single numbers: torch has a pinned buffer for them

OpCopies = Iterator[tuple[str, int]]  # (what, bytes)


class Sees(NamedTuple):
    """What an operator's copies follow from besides its operands: the device's ``type``, and how many bytes a pageable
    upload may have without waiting."""

    type: str
    inline: int

    def on_device(self, value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.device.type == self.type


class Announcement(NamedTuple):
    """``what`` as in ``compare_counts.Line``; ``stream`` is its identity, not its name."""

    step: int
    range: str
    stream: int
    site: int
    what: str


class Announced(Silence):
    """Gathers announcements while it listens."""

    def __init__(self, module: Any, device_type: str, sites: Sites, *, inline: int) -> None:
        self.counts: Counter[Announcement] = Counter()
        self.bytes: Counter[Announcement] = Counter()
        self.kinds: dict[int, str] = {}
        self.sees = Sees(device_type, inline)
        self._module = module
        self._sites = sites
        self._open: list[tuple[str, int]] = [("", -1)]
        self._recorded: dict[int, int] = {}  # stream by id of the event that was recorded on it last

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
        """Operators and waits are heard of in this block, on this thread."""
        event = self._module.Event
        with (
            replaced(syncs(self._module), self._waiting),
            replaced([Target(event, "record", "cudaEventRecord")], self._recording),
            _AnnouncingMode(self),
        ):
            yield

    def note(self, what: str, size: int = 0, stream: int | None = None) -> None:
        name, step = self._open[-1]
        where = self._current() if stream is None else stream
        announcement = Announcement(step, name, where, self._sites.here(), what)
        self.counts[announcement] += 1
        self.bytes[announcement] += size

    def _current(self) -> int:
        return int(self._module.current_stream().stream_id)

    def _waiting(self, target: Target, function: Function) -> Function:
        def waiting(*args: Any, **kwargs: Any) -> Any:
            self.note(target.call, stream=self._awaited(args))
            return function(*args, **kwargs)

        return waiting

    def _awaited(self, args: Sequence[Any]) -> int | None:
        """The stream that is waited for: an event's own, or the stream itself."""
        if args and hasattr(args[0], "stream_id"):
            return int(args[0].stream_id)
        return self._recorded.get(id(args[0])) if args else None

    def _recording(self, target: Target, function: Function) -> Function:  # noqa: ARG002
        def recording(event: Any, stream: Any = None) -> Any:
            self._recorded[id(event)] = self._current() if stream is None else int(stream.stream_id)
            return function(event) if stream is None else function(event, stream)

        return recording


class _AnnouncingMode(TorchDispatchMode):
    def __init__(self, announced: Announced) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._announced = announced

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:  # fmt: skip
        known = kwargs or {}
        result = func(*args, **known)
        sees = self._announced.sees
        for what, size in copies_of(sees, func._opname, args, known, result):
            self._announced.note(what, size)
            if what.endswith(" blocking") and not _held(what, size, args, known, sees.inline):
                self._announced.note(STREAM_SYNC)
        return result


def copies_of(sees: Sees, op: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> OpCopies:
    """What an operator copies between host and device."""
    on_device: Callable[[object], bool] = sees.on_device
    if op == "_to_copy":
        yield from _moved(sees, result, args[0], non_blocking=bool(kwargs.get("non_blocking")))
    elif op == "copy_":
        non_blocking = bool(args[2]) if len(args) > 2 else bool(kwargs.get("non_blocking"))
        yield from _moved(sees, args[0], args[1], non_blocking=non_blocking)
    elif op == "_local_scalar_dense" and on_device(args[0]):
        yield _READ, args[0].itemsize
    elif op == "lift_fresh" and on_device(args[0]) and args[0].numel():
        yield "h2d pageable blocking", args[0].nbytes  # torch.tensor(..., device=): made on the host
    elif op in READS and any(map(on_device, args)) and kwargs.get("output_size") is None:
        yield from ((_READ, size) for size in READS[op])
    elif op in _INDEXED and on_device(args[0]):
        yield from _indices(sees, op, args)


def _moved(sees: Sees, target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool) -> OpCopies:
    up, down = sees.on_device(target), sees.on_device(source)
    if up == down or not target.numel():
        return
    converts = target.dtype != source.dtype
    host, device = (source, target) if up else (target, source)
    direct = host.is_contiguous() and (non_blocking or not converts) and host.size() == device.size()
    pinned = direct and host.is_pinned()
    converted = (
        converts and non_blocking
    )  # on the device: then the source's bytes go up, the target's come down
    carried = (source if converted else target) if up else (target if converted else source)
    size = target.numel() * carried.itemsize
    held = not pinned and (not up or size > sees.inline)
    yield _words("h2d" if up else "d2h", pinned=pinned, blocking=held or not non_blocking), size


def _words(direction: str, *, pinned: bool, blocking: bool) -> str:
    return f"{direction} {'pinned' if pinned else 'pageable'}{' blocking' if blocking else ''}"


def _indices(sees: Sees, op: str, args: Sequence[Any]) -> OpCopies:
    """A mask's elements have to be counted, but for a fill with one value; indices of the host are brought over."""
    fills = op != "index" and len(args[1]) == 1 and args[2].numel() == 1
    for index in args[1]:
        if index is None:
            continue
        if not sees.on_device(index):
            yield "h2d pageable blocking", index.nbytes
        elif index.dtype in _MASKS and not fills:
            yield _READ, COUNT_BYTES
    if op != "index" and not sees.on_device(args[2]) and not fills:
        yield "h2d pageable blocking", args[2].nbytes


def _held(what: str, size: int, args: Sequence[Any], kwargs: Mapping[str, Any], inline: int) -> bool:
    """Whether the driver holds the call by itself: no sync of torch's then."""
    non_blocking = bool(kwargs.get("non_blocking")) or (len(args) > 2 and args[2] is True)
    return non_blocking and (
        what.startswith("d2h pageable") or (what.startswith("h2d pageable") and size > inline)
    )
