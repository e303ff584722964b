"""An adapter for the toy engine of these tests: schedbench's own scheduler with the additions of ``toy.loop``."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from schedbench.profiles.record.provenance import NO_RELAY, RelayPart
from schedbench.profiles.run.runner import OwnSystem
from schedbench.profiles.run.system import SystemParts
from schedbench.sched.batch import ScheduleBatch, StepResult


class ToySystem(OwnSystem):
    def __init__(self, parts: SystemParts, loop: ModuleType) -> None:
        super().__init__(parts)
        self.declared_hazards = ()
        self._loop = loop
        self._device = parts.machine.device
        self._link = parts.context.link
        loop.rank = parts.context.rank  # type: ignore[attr-defined]

    def relay_part(self) -> RelayPart:
        return RelayPart(state=NO_RELAY)

    def run(self) -> None:
        """``toy.loop`` has a function for the run, ``step``, and may have one for each settled step, ``settled``."""
        self._loop.step(self._device)
        settle, observer = self.scheduler.settle, self.scheduler.engine.observer

        def settled(batch: ScheduleBatch, result: StepResult) -> None:
            with observer.range("settle", batch.step, batch.batch_size):
                self._loop.settled(self._device)
            settle(batch, result)

        if hasattr(self._loop, "settled"):
            self.scheduler.settle = settled
        super().run()
        self.leak = getattr(self._loop, "leak", "")


class ToyAdapter:
    package = "toy"
    python_path = "python"
    hollow = ("toy_kernels",)

    def __init__(self) -> None:
        self.environment = {"TOY": "1", "TRITON_INTERPRET": "1"}
        self.requires: Mapping[str, str] = {}
        self._loop: Any = None

    def load(self) -> None:
        import toy.loop

        self._loop = toy.loop

    def open(self, parts: SystemParts) -> ToySystem:
        return ToySystem(parts, self._loop)


ADAPTER = ToyAdapter()
