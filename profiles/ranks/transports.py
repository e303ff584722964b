"""How the bytes of a message's tensors get from one process to another."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

NO_BYTES = torch.empty(0, dtype=torch.uint8)


class IncomingTensors(Protocol):
    """The bytes of a message's tensors, perhaps still on their way."""

    def arrived(self) -> bool:
        """Whether all of them are there."""

    def wait(self) -> torch.Tensor:
        """The bytes; the current stream waits for them."""


class TensorTransport(Protocol):
    """``body``: bytes of the host's or of a device's memory, written by what the current stream was given so far.
    ``ticket_type``: of what ``offer`` returns, for ``codec.reader``."""

    ticket_type: Any

    def offer(self, to: int, body: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """A ticket by which the receiver takes the body, and the bytes that travel with the message itself."""

    def push(self, to: int, body: torch.Tensor) -> None:
        """Send what does not travel with the message. Called after the message was queued."""

    def take(self, source: int, ticket: Any, inline: torch.Tensor) -> IncomingTensors:
        """Take what was offered. Called in the order in which one peer offered. Raises RuntimeError."""

    def close(self) -> None:
        """Return once what was pushed has left."""


class ArrivedTensors(NamedTuple):
    body: torch.Tensor

    def arrived(self) -> bool:
        return True

    def wait(self) -> torch.Tensor:
        return self.body


class MessageTransport:
    """Tensors travel with the message that names them, through the host's memory."""

    ticket_type: Any = None

    def offer(self, to: int, body: torch.Tensor) -> tuple[None, torch.Tensor]:  # noqa: ARG002
        return None, body.cpu()

    def push(self, to: int, body: torch.Tensor) -> None: ...

    def take(self, source: int, ticket: None, inline: torch.Tensor) -> ArrivedTensors:  # noqa: ARG002
        return ArrivedTensors(inline)

    def close(self) -> None: ...
