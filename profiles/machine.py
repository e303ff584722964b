"""What a run needs of the machine under it: a device, a clock, somebody who watches, and honest labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..sched.config import Capabilities
from ..sched.observe import Clock, Observer
from .result import HardwarePart, Labels
from .timeline import Names


class MachineError(RuntimeError):
    """This machine cannot do what was asked."""


@dataclass(frozen=True, slots=True)
class Machine:
    """``exact``: times repeat byte for byte. ``flush`` delivers what the watcher still holds. ``peek`` reads a device
    tensor without the device knowing: for checks that are no part of the run."""

    device: torch.device
    capabilities: Capabilities
    clock: Clock
    observer: Observer
    names: Names
    labels: Labels
    hardware: HardwarePart
    exact: bool
    flush: Callable[[], None]
    peek: Callable[[torch.Tensor], torch.Tensor]
    environment: dict[str, Any]
