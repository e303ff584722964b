"""When a stream stood still for an event of another stream.

CUPTI records when the host asked for a wait. How long the stream waited follows from the operations around it::

    awaited stream    |--- last op before the record ---|
    waiting stream    |- last op before the wait -|     |- next
                                                  |wait |
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from .kineto import GPU, SYNC, WAIT_EVENT, KinetoRow


class StreamWait(NamedTuple):
    """``stream`` is CUPTI's number, instants are as in the rows; ``call`` asked for the wait."""

    stream: int
    start: int
    end: int
    call: KinetoRow


def stream_waits(rows: Sequence[KinetoRow], calls: Mapping[int, KinetoRow]) -> Iterator[StreamWait]:
    """``calls`` by correlation. A wait for an event whose record is unknown is left out."""
    finish = _Finish(rows, calls)
    for row in rows:
        if row.category != SYNC or row.name != WAIT_EVENT:
            continue
        call, record = calls.get(row.correlation), calls.get(row.waits_for)
        if call is None or record is None:
            continue
        start = max(call.end, finish.before(row.stream, call.start))
        end = finish.before(row.source, record.start)
        if end > start:
            yield StreamWait(row.stream, start, end, call)


class _Finish:
    """When all operations that a stream had been given by some instant were done."""

    def __init__(self, rows: Sequence[KinetoRow], calls: Mapping[int, KinetoRow]) -> None:
        given: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for row in rows:
            if row.category in GPU and (call := calls.get(row.correlation)) is not None:
                given[row.stream].append((call.start, row.end))
        self._launched: dict[int, list[int]] = {}
        self._done: dict[int, list[int]] = {}
        for stream, pairs in given.items():
            pairs.sort()
            self._launched[stream] = [launched for launched, _ in pairs]
            self._done[stream] = list(accumulate((end for _, end in pairs), max))

    def before(self, stream: int, instant: int) -> int:
        """0 if the stream had been given no operation."""
        index = bisect_left(self._launched.get(stream, []), instant)
        return self._done[stream][index - 1] if index else 0
