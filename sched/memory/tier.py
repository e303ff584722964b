"""Where the KV of running requests is: on the device, or partly on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from ..batch import ScheduleBatch
from ..request import Request
from .invariants import Peek
from .pools import KVAllocator


class HostView(Protocol):
    """What the relay provides about a decode batch, each as its state obtains it."""

    def host_indices(self, batch: ScheduleBatch) -> torch.Tensor:
        """The requests' rows [b] int64 on the host."""

    def buffer_lengths(self, batch: ScheduleBatch) -> torch.Tensor:
        """The requests' lengths [b] int64 on the device, including the new tokens."""

    def backup_indices(self, picked: Sequence[int]) -> torch.Tensor | None:
        """``picked`` on the device, [n] int64; None if the device does not need it."""


class KVTier:
    """The tier of an engine whose KV is on the device, in the slots of the page table: it manages nothing.
    ``Coordinator`` is the tier of an engine with KV on the host. All methods are called on the schedule stream unless
    noted."""

    stages = False  # whether a prefilled request has to be staged before it can decode
    can_offload = True  # whether a retracted request can resume if another worker computed its prompt

    def __init__(self, allocator: KVAllocator) -> None:
        self._allocator = allocator

    @property
    def size(self) -> int:
        """Tokens of the longest request that can be prefilled alone."""
        return self._allocator.size

    @property
    def absent(self) -> Sequence[Request]:
        """Requests whose prompt has been launched and that are not decoding and have not ended, in order of admission;
        includes a prompt of which chunks remain."""
        return ()

    def available_size(self) -> int:
        """Free slots of the page table."""
        return self._allocator.available_size()

    def unclaimed_size(self) -> int:
        """Tokens on the device that no request holds or will need. It and all claims are 0 unless KV moves to the
        host."""
        return 0

    def claim(self, req: Request) -> int:  # noqa: ARG002
        """The most tokens on the device that ``req`` will need: for its prompt, and then for its hot buffer."""
        return 0

    def fits(self, reqs: Sequence[Request]) -> bool:  # noqa: ARG002
        """Whether the device has room for one more token of each of the running ``reqs``."""
        return True

    def place_prompts(self, batch: ScheduleBatch) -> None:
        """Allocate device memory for the new tokens of an extend batch that has its slots."""

    def place_tokens(self, batch: ScheduleBatch, view: HostView) -> None:
        """Allocate device memory for the new token of each request of a decode batch, whose lengths include it."""

    def before_forward(self, batch: ScheduleBatch) -> None:
        """Called on the stream that is about to run the forward of ``batch``."""

    def admit(self, req: Request) -> None:
        """Called when the whole prompt has been computed and the request continues."""

    def has_room(self, req: Request) -> bool:  # noqa: ARG002
        """Whether device memory suffices for ``req``, whose prompt another worker computes, until its end."""
        return True

    def expect(self, req: Request) -> None:
        """Prepare for the KV of such a request, which has a row and slots."""

    def admit_direct(self, req: Request) -> None:
        """Called when that KV has been received and the request starts to decode."""

    def collect_ready_reqs(self) -> list[Request]:
        """Staged requests that can decode from now on, in order."""
        return []

    def is_staging(self, req: Request) -> bool:  # noqa: ARG002
        return False

    def tables(self) -> Mapping[str, torch.Tensor]:
        """Device tensors that steps share, by name."""
        return {}

    def check(self, peek: Peek) -> None:
        """Raise MemoryInvariantError unless every page is in exactly one place. Called between steps; ``peek`` returns
        the host's view of a device tensor."""

    def release(self, req: Request) -> None:
        """Take back everything that ``req`` holds, in any state; its row and slots are released afterwards."""
