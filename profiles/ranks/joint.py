"""Several devices' discrete events as one sequence, for as long as one may wait for another."""

from __future__ import annotations

from collections.abc import Sequence

from ..vgpu.engine import EventRecording, EventTime, Simulation


class _Any:
    """Known as soon as one of the marks is."""

    def __init__(self, marks: Sequence[EventTime]) -> None:
        self._marks = marks

    @property
    def time(self) -> int | None:
        return next((mark.time for mark in self._marks if mark.time is not None), None)


def advance(devices: Sequence[Simulation], bound: int, awaited: Sequence[EventRecording]) -> None:
    """Serve what starts no later than ``bound``, or than the first of the ``awaited`` marks.

    A device runs as far as the next event of any other, or until it releases another: nothing that it waits for can
    come sooner.

        device 0   --x-----------x----      runs to the x of device 1,
        device 1   ------x------------      which may release device 0 or not
    """
    unknown = list(awaited)
    while True:
        bound = min([bound, *(mark.time for mark in unknown if mark.time is not None)])
        unknown = [mark for mark in unknown if mark.time is None]
        starts = sorted(
            (start, place)
            for place, device in enumerate(devices)
            if (start := device.next_start()) is not None and start <= bound
        )
        if not starts:
            return
        limit = min(bound, starts[1][0]) if len(starts) > 1 else bound
        held = [mark for device in devices for mark in device.awaited()]
        devices[starts[0][1]].run(limit, _Any([*unknown, *held]))
