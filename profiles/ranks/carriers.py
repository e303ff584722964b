"""Ways of tensors' bytes from one process to another: with the message that names them, or by NIXL."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, NamedTuple, Protocol

import torch

from ..platform.machine import MachineError

_GLANCE: Final = 5e-5  # seconds between two looks at a transfer
_NOTHING: Final = torch.empty(0, dtype=torch.uint8)


class TensorMessage(Protocol):
    """The bytes of a message's tensors, perhaps still on their way."""

    def landed(self) -> bool:
        """Whether they are all there."""

    def opened(self) -> torch.Tensor:
        """For the current stream, which waits for them."""


class Carrier(Protocol):
    """``body``: bytes of the host's or of a device's memory, written by what the current stream was given so far."""

    def give(self, to: int, body: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """What the receiver is to be told, and what of the host's memory goes along with that."""

    def push(self, to: int, body: torch.Tensor) -> None:
        """What goes by a way of its own, now that the receiver is being told."""

    def take(self, source: int, told: Any, along: torch.Tensor) -> TensorMessage:
        """What was given. Called in the order in which one peer gave. Raises RuntimeError."""

    def close(self) -> None:
        """Once what was given has left."""


class There(NamedTuple):
    body: torch.Tensor

    def landed(self) -> bool:
        return True

    def opened(self) -> torch.Tensor:
        return self.body


class ByMessage:
    def give(self, to: int, body: torch.Tensor) -> tuple[None, torch.Tensor]:  # noqa: ARG002
        return None, body.cpu()

    def push(self, to: int, body: torch.Tensor) -> None:
        """All of it went along."""

    def take(self, source: int, told: None, along: torch.Tensor) -> There:  # noqa: ARG002
        return There(along)

    def close(self) -> None:
        """Nothing is under way."""


class _Buffer(NamedTuple):
    number: int
    memory: torch.Tensor


class _Ticket(NamedTuple):
    """``metadata`` says whose the buffer of that number is and how it is reached, ``descs`` where the bytes are."""

    owner: str
    number: int
    size: int
    metadata: bytes
    descs: bytes


class Nixl:
    """The receiver reads what the sender has laid out, and its notification gives the sender's buffer back.

    Buffers are registered once, and used again: a new one is made where none that is free is large enough.
    """

    def __init__(self, name: str, *, patience: float) -> None:
        api = import_module("nixl._api")
        self._name = name
        self._patience = patience
        self._agent: Any = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
        self._lock = threading.Lock()
        self._buffers: list[torch.Tensor] = []
        self._free: list[_Buffer] = []
        self._known: set[tuple[str, int]] = set()  # buffers of others

    def give(self, to: int, body: torch.Tensor) -> tuple[_Ticket | None, torch.Tensor]:  # noqa: ARG002
        if not body.numel():
            return None, body
        agent, size = self._agent, body.numel()
        with self._lock:
            for notes in agent.get_new_notifs().values():
                self._free += [_Buffer(number, self._buffers[number]) for number in map(int, notes)]
            number, memory = self._buffer(size)
            memory[:size].copy_(body)
            metadata = agent.get_partial_agent_metadata(agent.get_reg_descs([memory]), inc_conn_info=True)
            descs = agent.get_serialized_descs(agent.get_xfer_descs([memory[:size]]))
        return _Ticket(self._name, number, size, metadata, descs), _NOTHING

    def push(self, to: int, body: torch.Tensor) -> None:
        """The receiver reads it."""

    def take(self, source: int, told: _Ticket | None, along: torch.Tensor) -> There:  # noqa: ARG002
        if told is None:
            return There(along)
        try:
            return There(self._read(told))
        except Exception as error:  # NIXL's own errors have no other class in common
            raise RuntimeError(f"{type(error).__name__}: {error}") from None

    def close(self) -> None:
        """What nobody has read goes with the process."""

    def _read(self, told: _Ticket) -> torch.Tensor:
        agent = self._agent
        with self._lock:
            if (told.owner, told.number) not in self._known:
                agent.add_remote_agent(told.metadata)
                self._known.add((told.owner, told.number))
            buffer = self._buffer(told.size)
            here = agent.get_xfer_descs([buffer.memory[: told.size]])
            there = agent.deserialize_descs(told.descs)
            handle = agent.initialize_xfer("READ", here, there, told.owner, str(told.number).encode())
            state = agent.transfer(handle)
        self._await(handle, state)
        body = buffer.memory[: told.size].clone()
        with self._lock:
            agent.release_xfer_handle(handle)
            self._free.append(buffer)
        return body

    def _await(self, handle: Any, state: str) -> None:
        deadline = time.monotonic() + self._patience
        while state != "DONE":
            if state == "ERR" or time.monotonic() > deadline:
                raise RuntimeError(f"a transfer by NIXL ended as {state}")
            time.sleep(_GLANCE)
            with self._lock:
                state = self._agent.check_xfer_state(handle)

    def _buffer(self, size: int) -> _Buffer:
        """The smallest that is free and large enough."""
        fitting = [buffer for buffer in self._free if buffer.memory.numel() >= size]
        if fitting:
            found = min(fitting, key=lambda buffer: buffer.memory.numel())
            self._free.remove(found)
            return found
        memory = torch.empty(1 << (size - 1).bit_length(), dtype=torch.uint8)
        self._agent.register_memory([memory])
        self._buffers.append(memory)
        return _Buffer(len(self._buffers) - 1, memory)


def nixl(names: Sequence[str], rank: int, *, patience: float) -> Nixl:
    """Raises MachineError where NIXL is not installed, or does not start."""
    require_nixl()
    try:
        import_module("nixl")
        log = logging.getLogger("nixl")
        log.setLevel(logging.WARNING)
        for handler in log.handlers:  # it writes to stdout, which carries the result
            if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout:
                handler.setStream(sys.stderr)
        return Nixl(names[rank], patience=patience)
    except Exception as error:  # as above
        raise MachineError(f"engine.disaggregation.transfer: NIXL does not start: {error}") from None


def require_nixl() -> None:
    """Raises MachineError where it is not installed."""
    if find_spec("nixl") is None:
        raise MachineError(
            "engine.disaggregation.transfer: nixl is not installed: pip install 'schedbench[nixl]' (Linux)"
        )
