"""What joins the ranks of a run: messages between hosts, and tensors between devices.

A rank is one scheduler with a device of its own. Messages of one sender with one tag arrive in the order in which they
were sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import torch

FOREVER: Final = 1 << 62  # ns: an instant that never comes


class LinkError(RuntimeError):
    """A peer is gone, or did not answer in time: who waited for what, and how long."""


class Message(NamedTuple):
    """``tensors`` are on the receiver's device; what the current stream does after receiving comes after them."""

    source: int
    value: Any
    tensors: tuple[torch.Tensor, ...]


class Link(Protocol):
    """One rank's end of all its connections."""

    rank: int
    size: int

    def send(self, to: int, tag: str, value: Any, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Send after what the current stream has been given so far. Neither host nor current stream waits; tensors are
        kept, and may not be written, before ``flush``. ``value`` is anything that can be pickled. To a rank that is
        gone it goes nowhere."""

    def flush(self, tag: str) -> None:
        """The current stream waits until everything sent under that tag has left its tensors."""

    def receive(self, source: int, tag: str) -> Message:
        """The next message, waiting for the peer's host to send it; for its tensors only the current stream waits.
        Raises LinkError."""

    def all_to_all(self, tag: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """``tensors``: one for each rank, in their order; one from each comes back, the own one as it is. Called by all
        ranks alike. The current stream waits until what was sent has left and what comes has landed. Raises
        LinkError."""

    def poll(self, tag: str) -> Message | None:
        """The next message of anybody that has arrived whole, tensors included; None if there is none."""

    def wait(self, tags: Sequence[str], until: int | None) -> None:
        """Sleep until there is something to poll, a rank is gone, or until that instant of the clock.

        None: peers owe something, and have so long for it that they must be in trouble. FOREVER: nobody owes
        anything; it may return with nothing to poll. Raises LinkError where nothing comes that was owed, or cannot come
        any more."""

    def gone(self) -> Mapping[int, str]:
        """Ranks that are known to send no more, beyond what can be polled from now on, and why. Raises LinkError where
        nobody goes on without them."""
