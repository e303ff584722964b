"""The three streams of an engine, and the order between them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from .config import EngineConfig


@dataclass(slots=True)
class Streams:
    """The forward stream runs forwards and publishes their results; the copy stream handles what is sent to and
    received from other ranks; the schedule stream runs everything else. Without side streams all three are the same."""

    schedule: Any
    forward: Any
    copy: Any
    module: Any  # torch.cuda, or the virtual device's counterpart of it

    @classmethod
    def of(cls, config: EngineConfig) -> Streams:
        module: Any = torch.get_device_module(config.device)
        if not config.capabilities.side_streams:
            only = module.current_stream()
            return cls(only, only, only, module)
        return cls(module.Stream(), module.Stream(), module.Stream(), module)

    def on(self, stream: Any) -> AbstractContextManager[object]:
        entered: AbstractContextManager[object] = self.module.stream(stream)
        return entered

    def wait(self, waiting: Any, awaited: Any) -> None:
        """Order all later work of ``waiting`` after all work that ``awaited`` has been given so far."""
        if waiting is not awaited:
            waiting.wait_stream(awaited)

    def record(self, tensor: torch.Tensor, stream: Any) -> None:
        """Note that ``stream`` reads a tensor of the schedule stream: its memory is not reused before that read."""
        if stream is not self.schedule:
            tensor.record_stream(stream)
