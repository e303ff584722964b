"""The interface through which a scheduler receives requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .request import Request


class RequestSource(Protocol):
    """Hands out requests as they arrive. Instants are nanoseconds of the engine's clock."""

    def due(self, now: int) -> Sequence[Request]:
        """Requests that have arrived by ``now`` and were not handed out yet, in order of arrival."""

    def next_at(self) -> int | None:
        """When the next request arrives; None while that depends on others ending, or when there is none."""

    def ended(self, request: Request, now: int) -> None:
        """Note that ``request`` has ended at ``now``; a closed-loop workload sends the next one."""
