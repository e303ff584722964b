"""Builders of synthetic records, a hand-drawn timeline, and random ones that obey the record contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from schedbench.profiles.record.timeline import NO_SITE, Call, Op, Range, Wait, Window
from schedbench.sched.observe import StepInfo

SCHEDULE, FORWARD, COPY = 0, 1, 2


class Drawing:
    """A hand-drawn timeline, in units of ``unit`` ns (microseconds by default)."""

    def __init__(self, unit: int = 1000) -> None:
        self.records: list[tuple[int, str, Any]] = []
        self._unit = unit

    def _ns(self, time: float) -> int:
        return round(time * self._unit)

    def _put(self, kind: str, end: int, record: object) -> None:
        self.records.append((end, kind, record))

    def op(self, start: float, end: float, *, step: int, stream: int = SCHEDULE, **more: Any) -> None:
        fields: dict[str, Any] = {
            "kind": "kernel", "name": "k", "bytes": 0, "host_bytes": 0, "host_memory": "", "blocking": False,
            "range": "", "forward": False, "site": NO_SITE, "launched": start,
        } | more  # fmt: skip
        fields["launched"] = self._ns(fields["launched"])
        op = Op(stream=stream, start=self._ns(start), end=self._ns(end), step=step, **fields)
        self._put("ops", op.end, op)

    def forward(self, start: float, end: float, *, step: int, **more: Any) -> None:
        self.op(start, end, step=step, **({"stream": FORWARD, "range": "model", "forward": True} | more))

    def call(self, start: float, end: float, *, step: int, waited: float = 0, **more: Any) -> None:
        fields = {
            "kind": "sync",
            "name": "synchronize",
            "stream": SCHEDULE,
            "range": "settle",
            "site": NO_SITE,
        }
        call = Call(
            start=self._ns(start), end=self._ns(end), waited=self._ns(waited), step=step,
            **(fields | more),
        )  # fmt: skip
        self._put("calls", call.end, call)

    def wait(self, start: float, end: float, *, step: int, stream: int = FORWARD) -> None:
        wait = Wait(stream, self._ns(start), self._ns(end), step)
        self._put("waits", wait.end, wait)

    def range(self, start: float, end: float, *, name: str = "prepare", step: int = 0) -> None:
        self._put("ranges", self._ns(end), Range(name, step, 0, self._ns(start), self._ns(end)))

    def sleep(self, start: float, end: float) -> None:
        self.range(start, end, name="sleep", step=-1)

    def step(
        self,
        step: int,
        *,
        launched: float,
        settled: float | None,
        kind: str = "decode",
        steady: bool = False,
    ) -> None:
        early = StepInfo(step, kind, 1, 1, False)  # type: ignore[arg-type]
        self._put("launched", self._ns(launched), early)
        if settled is not None:
            self._put("settled", self._ns(settled), early._replace(steady=steady))

    def windows(self, cuts: Sequence[int] = ()) -> list[Window]:
        """One window, or several cut at the given instants (ns)."""
        ordered = sorted(self.records, key=lambda record: record[0])
        end = ordered[-1][0] + 1 if ordered else 0
        edges = [0, *sorted(cut for cut in set(cuts) if 0 < cut < end), end]
        windows = [Window(a, b) for a, b in pairwise(edges)]
        for window in windows:
            for at, kind, record in ordered:
                if window.start <= at < window.end:
                    getattr(window, kind).append(record)
        return windows


class Play:
    """Plays a random overlapped loop against three in-order streams. Times are small, so that a test can examine every
    nanosecond."""

    def __init__(self, random: Random) -> None:
        self.drawing = Drawing(unit=1)
        self._random = random
        self._host = 0
        self._free = {SCHEDULE: 0, FORWARD: 0, COPY: 0}
        self._ends: dict[int, int] = {}

    def run(self, steps: int) -> Drawing:
        for step in range(steps):
            self._prepare(step)
            self._launch(step)
            if step:
                self._settle(step - 1)
        self._settle(steps - 1)
        return self.drawing

    def _prepare(self, step: int) -> None:
        if self._random.random() < 0.2:
            until = self._host + self._random.randint(1, 30)
            self.drawing.sleep(self._host, until)
            self._host = until
        opened = self._host
        for _ in range(self._random.randint(0, 2)):
            self._host += self._random.randint(5, 9)
            kind, blocking = self._random.choice(["kernel", "h2d", "d2h"]), self._random.random() < 0.3
            stream = COPY if kind == "d2h" else SCHEDULE
            start = max(self._host + 1, self._free[stream])
            end = self._free[stream] = start + self._random.randint(1, 5)
            site = self._random.randint(0, 3)
            self.drawing.op(
                start, end, step=step, stream=stream, kind=kind, launched=self._host, site=site,
                bytes=0 if kind == "kernel" else 8, blocking=blocking and kind != "kernel",
                host_memory="" if kind == "kernel" else "pageable",
            )  # fmt: skip
            if kind != "kernel":
                self._call(step, until=end if blocking else 0, kind="copy", stream=stream, site=site)
        self.drawing.range(opened, self._host, step=step)

    def _call(self, step: int, *, until: int, **fields: Any) -> None:
        start = self._host
        ready = start + 1
        self._host = max(ready, until)
        self.drawing.call(start, self._host, step=step, waited=self._host - ready, **fields)

    def _launch(self, step: int) -> None:
        opened = self._host
        held_until = self._free[SCHEDULE] if self._random.random() < 0.5 else 0
        for number in range(self._random.randint(0 if step % 7 == 3 else 1, 3)):
            self._host += self._random.randint(1, 4)
            ready = max(self._host + 1, self._free[FORWARD])
            start = max(ready, held_until) if number == 0 else ready
            if start > ready:
                self.drawing.wait(ready, start, step=step)
            self._free[FORWARD] = start + self._random.randint(1, 25)
            self.drawing.forward(start, self._free[FORWARD], step=step, launched=self._host)
        self._ends[step] = self._free[FORWARD]
        self._launched_at = self._host
        self.drawing.range(opened, self._host, name="model", step=step)

    def _settle(self, step: int) -> None:
        opened = self._host + self._random.choice([0, 0, 3])  # a little time outside any range
        self._host = opened + self._random.randint(0, 6)
        self._call(step, until=self._ends[step], kind="sync", stream=FORWARD, site=7)
        self.drawing.range(opened, self._host, name="settle", step=step)
        kind = self._random.choice(["decode", "decode", "prefill"])
        steady = self._random.random() < 0.5
        self.drawing.step(step, launched=self._launched_at, settled=self._host, kind=kind, steady=steady)


@pytest.fixture
def drawing() -> Drawing:
    return Drawing()


@pytest.fixture(scope="session")
def play() -> Callable[[Random, int], Drawing]:
    """Draws a random timeline of so many steps."""
    return lambda random, steps: Play(random).run(steps)
