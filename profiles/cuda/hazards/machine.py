"""A machine whose runs are watched from inside for accesses that nothing orders."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from .... import sched
from ....sched.config import Capabilities
from ....sched.observe import Silence, StepInfo
from ...platform.machine import Machine, MachineError
from ...platform.resolve import Resolved
from ...record.result import HardwarePart, Labels
from ...record.timeline import Sink, Window
from ..clock import WallClock
from ..machine import facts
from .watch import Inside, Watched, watching

VOID: Final = (
    "hazards were watched for from inside the process, which makes the host wait: times mean nothing"
)


class WatchedSteps(Silence):
    """Which steps there were and what streams are called: all that such a run knows of itself."""

    def __init__(self, inside: Inside) -> None:
        self._inside = inside
        self._launched: list[StepInfo] = []
        self._settled: list[StepInfo] = []

    def stream(self, name: str, stream: Any) -> None:
        self._inside.announce(name, stream)

    def launched(self, info: StepInfo) -> None:
        self._launched.append(info)

    def settled(self, info: StepInfo) -> None:
        self._settled.append(info)

    def deliver(self, sink: Sink, start: int, end: int) -> None:
        sink.feed(
            Window(start, end, ranges=[], ops=[], calls=[], launched=self._launched, settled=self._settled)
        )
        self._launched, self._settled = [], []


def require_one_device(resolved: Resolved) -> None:
    """Raises MachineError where there is no CUDA, or the scenario is none for one real device."""
    if not torch.cuda.is_available():
        raise MachineError(
            "no CUDA device here (torch.cuda.is_available() is False): nothing can be watched on one; "
            "check --device vgpu watches a virtual one"
        )
    if resolved.scenario.engine.ranks > 1:
        raise MachineError("the scenario has several ranks: what is watched is one device")


@contextmanager
def open_watched(resolved: Resolved, sink: Sink) -> Iterator[Machine]:  # cuda-only
    """The current CUDA device until the block ends, without gradients. Raises MachineError when there is none."""
    if not torch.cuda.is_available():
        raise MachineError("no CUDA device here (torch.cuda.is_available() is False)")
    device = torch.device("cuda", torch.cuda.current_device())
    inline = round(resolved.hardware.copies.pageable_inline.value)
    seen = Watched(torch.cuda, device.type, inline)
    with torch.no_grad(), watching(seen, [Path(folder) for folder in sched.__path__]) as inside:
        clock, steps = WallClock(), WatchedSteps(inside)
        yield Machine(
            device=device,
            capabilities=Capabilities(),
            clock=clock,
            observer=steps,
            names=inside,
            labels=Labels(emulated=False, host="measured"),
            hardware=HardwarePart(name=torch.cuda.get_device_name(device)),
            exact=False,
            flush=lambda: steps.deliver(sink, 0, clock.now()),
            peek=inside.peek,
            environment={name: fact for name, fact in facts(device).items() if name != "source_of_counts"},
            hazards=inside.checker,
            untimed=VOID,
        )
