"""Where the KV of running requests lives, as the loop asks: all of it on the device, or a part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from ..batch import ScheduleBatch
from ..memory.invariants import Peek
from ..memory.tokens import KVAllocator
from ..request import Request


class HostView(Protocol):
    """What the relay knows of a batch on the host, by its state's own ways."""

    def host_indices(self, batch: ScheduleBatch) -> torch.Tensor:
        """The requests' rows [b] int64 on the host."""

    def buffer_lengths(self, batch: ScheduleBatch) -> torch.Tensor:
        """The requests' lengths [b] int64 on the device, new tokens counted."""

    def backup_indices(self, picked: Sequence[int]) -> torch.Tensor | None:
        """The list on the device, [n] int64; None where the device need not be told."""


class KVTier(Protocol):
    """The loop's side of it. Everything is called on the schedule stream unless said otherwise."""

    stages: bool  # whether a prefilled request has to be staged before it can decode
    parks: bool  # whether a retracted request, whose prompt another worker computed, can come back

    @property
    def size(self) -> int:
        """Tokens of the longest request that could ever be prefilled alone."""

    @property
    def absent(self) -> Sequence[Request]:
        """Requests whose prompt is launched and that neither decode nor have ended, in order of admission; a prompt of
        which a chunk is to come is among them."""

    def available_size(self) -> int:
        """Slots of the page table that are free."""

    def unclaimed_size(self) -> int:
        """Tokens on the device that nobody has, and that nobody who is there will need. It counts only where KV moves
        to the host: else it is 0, and so is every claim."""

    def claim(self, req: Request) -> int:
        """Tokens on the device that ``req`` will need at most: for its prompt, and then for its hot buffer."""

    def fits(self, reqs: Sequence[Request]) -> bool:
        """Whether each of the running ``reqs`` can have one more token, as far as the device's part is concerned."""

    def place_prompts(self, batch: ScheduleBatch) -> None:
        """Device memory for the new tokens of an extend batch whose slots are there."""

    def place_tokens(self, batch: ScheduleBatch, view: HostView) -> None:
        """Device memory for the new token of each request of a decode batch, whose lengths count it."""

    def before_forward(self, batch: ScheduleBatch) -> None:
        """On the stream that is about to run the batch's forward."""

    def admit(self, req: Request) -> None:
        """The whole prompt is computed, and the request goes on."""

    def has_room(self, req: Request) -> bool:
        """Whether there is device memory for all that a request may become whose prompt another worker computes."""

    def expect(self, req: Request) -> None:
        """The KV of such a request will come in; it has a row, and slots."""

    def admit_direct(self, req: Request) -> None:
        """It has come in, and the request decodes from now on."""

    def collect_ready_reqs(self) -> list[Request]:
        """Staged requests that can decode from now on, in order."""

    def is_staging(self, req: Request) -> bool: ...

    def tables(self) -> Mapping[str, torch.Tensor]:
        """Device tensors that steps share, by what to call them."""

    def check(self, peek: Peek) -> None:
        """Raise MemoryInvariantError unless every page is in exactly one place. Between steps; ``peek`` gives the
        host's view of a device tensor."""

    def release(self, req: Request) -> None:
        """Take back everything of a request, whatever it is at; its row and its slots are still its own."""


class DeviceTier:
    """All KV on the device, in the slots of the page table."""

    stages = False
    parks = True
    absent: Sequence[Request] = ()

    def __init__(self, allocator: KVAllocator) -> None:
        self._allocator = allocator

    @property
    def size(self) -> int:
        return self._allocator.size

    def available_size(self) -> int:
        return self._allocator.available_size()

    def unclaimed_size(self) -> int:
        return 0

    def claim(self, req: Request) -> int:  # noqa: ARG002
        return 0

    def fits(self, reqs: Sequence[Request]) -> bool:  # noqa: ARG002
        return True

    def place_prompts(self, batch: ScheduleBatch) -> None: ...

    def place_tokens(self, batch: ScheduleBatch, view: HostView) -> None: ...

    def before_forward(self, batch: ScheduleBatch) -> None: ...

    def admit(self, req: Request) -> None: ...

    def has_room(self, req: Request) -> bool:  # noqa: ARG002
        return True

    def expect(self, req: Request) -> None: ...

    def admit_direct(self, req: Request) -> None: ...

    def collect_ready_reqs(self) -> list[Request]:
        return []

    def is_staging(self, req: Request) -> bool:  # noqa: ARG002
        return False

    def tables(self) -> Mapping[str, torch.Tensor]:
        return {}

    def check(self, peek: Peek) -> None: ...

    def release(self, req: Request) -> None: ...
