"""What happens to memory and does not show in dispatch: the calls that a watcher of the virtual GPU receives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import torch

from ..record.hazards import FoundHazard
from ..record.timeline import Site


class Watcher:
    """Ignores every call. Subclasses follow memory: the hazard checker, and the adversary's re-use of freed blocks.

    ``spent`` is the time in ns of this process that watching has taken so far.
    """

    _NOTHING: ClassVar[AbstractContextManager[None]] = nullcontext()

    spent = 0

    def listening(self) -> AbstractContextManager[None]:
        """Surrounds everything that happens on the virtual GPU."""
        return self._NOTHING

    def made(self, tensor: torch.Tensor) -> None:
        """``tensor`` is new memory, or a view, and nothing was launched."""

    def host_access(self, op: str, tensor: torch.Tensor, *, write: bool) -> None:
        """The host itself reads or writes pinned memory."""

    def sent(self, tensor: torch.Tensor) -> None:
        """A link reads the values on the current stream."""

    def generated(self, op: str, tensor: torch.Tensor) -> None:
        """``op`` launched a kernel that writes new memory."""

    def name(self, tensor: torch.Tensor, name: str) -> None:
        """Name the tensor's memory in all later reports."""

    def record_stream(self, tensor: torch.Tensor, queue: int) -> None:
        """Once freed, the tensor's memory is not re-issued before that stream has done its present work."""

    def capturing(self, capture: object | None) -> None:
        """Operations become nodes of that graph from now on; with None they are executed again."""

    def replaying(self, capture: object) -> AbstractContextManager[None]:  # noqa: ARG002
        """Surrounds the computation of a graph that is launched."""
        return self._NOTHING

    def found(self, sites: Sequence[Site], streams: Mapping[int, str]) -> tuple[FoundHazard, ...]:  # noqa: ARG002
        """Accesses that nothing orders."""
        return ()

    def unread(self, sites: Sequence[Site], streams: Mapping[int, str]) -> tuple[FoundHazard, ...]:  # noqa: ARG002
        """Named memory that was written and never read."""
        return ()
