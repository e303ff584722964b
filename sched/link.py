"""The connections between the ranks of a run: messages between hosts, and tensors between devices.

A rank is one scheduler with a device of its own. Messages of one sender with one tag arrive in the order in which they
were sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import torch

FOREVER: Final = 1 << 62  # ns: later than any instant of a run


class LinkError(RuntimeError):
    """A peer is gone, or did not answer in time. The message names the waiting rank, what it waited for and how
    long."""


class Message(NamedTuple):
    """``tensors`` are on the receiver's device; later work of the current stream is ordered after their arrival."""

    source: int
    value: Any
    tensors: tuple[torch.Tensor, ...]


class Link(Protocol):
    """One rank's end of all its connections."""

    rank: int
    size: int

    def send(self, to: int, tag: str, value: Any, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Send after all work that the current stream has been given so far. Neither host nor current stream waits;
        tensors are kept, and may not be written, before ``flush``. ``value`` is of the type that belongs to the tag. A
        message to a rank that is gone is discarded."""

    def flush(self, tag: str) -> None:
        """Let the current stream wait until all tensors sent under that tag have been read."""

    def receive(self, source: int, tag: str) -> Message:
        """Wait until the peer's host has sent the next message, and return it; only the current stream waits for its
        tensors. Raises LinkError."""

    def all_to_all(self, tag: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Send ``tensors``, one to each rank in rank order, and return one from each rank, the own one unchanged. All
        ranks call it alike. The current stream waits until all tensors have been read and received. Raises
        LinkError."""

    def poll(self, tag: str) -> Message | None:
        """The next message of any rank that has arrived completely, including its tensors; None if there is none."""

    def wait(self, tags: Sequence[str], until: int | None) -> None:
        """Sleep until there is a message to poll, a rank is gone, or the clock reaches ``until``.

        With None a message is expected, within a deadline that only a failure exceeds. With FOREVER no message is
        expected, and the call may return without one. Raises LinkError if an expected message does not come or cannot
        come any more."""

    def gone(self) -> Mapping[int, str]:
        """Ranks that are known to send nothing beyond what can be polled now, with reasons. Raises LinkError if this
        rank cannot continue without them."""
