"""Tensors between processes by NIXL."""

from __future__ import annotations

import logging
import sys
import threading
import time
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, NamedTuple, Self

import torch

from ..platform.machine import MachineError
from .transports import NO_BYTES, IncomingTensors, TensorTransport

_POLL_S: Final = 5e-5  # seconds between two looks at a transfer


class _NixlBuffer(NamedTuple):
    number: int
    memory: torch.Tensor


class _NixlTicket(NamedTuple):
    """``size`` bytes at ``address`` of the owner's memory, in its buffer of that number. ``metadata`` describes that
    buffer and how to reach it."""

    owner: str
    number: int
    address: int
    size: int
    metadata: bytes

    @property
    def region(self) -> tuple[int, int, int]:
        """For ``get_xfer_descs``: device 0 is the host. NIXL's own serialized form of it is a pickle, which a receiver
        must not load."""
        return self.address, self.size, 0


class NixlTransport(TensorTransport):
    """The receiver reads from the sender's buffer, and its notification frees that buffer. What no receiver has read is
    dropped with the process.

    Buffers are registered once and reused; a new one is made where no free one is large enough.
    """

    ticket_type: Any = _NixlTicket | None

    def __init__(self, name: str, *, patience: float) -> None:
        api = import_module("nixl._api")
        self._name = name
        self._patience = patience
        self._agent: Any = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
        self._lock = threading.Lock()
        self._buffers: list[torch.Tensor] = []
        self._free: list[_NixlBuffer] = []
        self._known: set[tuple[str, int]] = set()  # other processes' buffers, by owner and number

    @classmethod
    def start(cls, name: str, *, patience: float) -> Self:
        """Raises MachineError where NIXL is not installed, or does not start."""
        require_nixl()
        try:
            import_module("nixl")
            log = logging.getLogger("nixl")
            log.setLevel(logging.WARNING)
            for handler in log.handlers:  # it writes to stdout, which carries the result
                if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout:
                    handler.setStream(sys.stderr)
            return cls(name, patience=patience)
        except Exception as error:  # NIXL's own errors have no other class in common
            raise MachineError(f"engine.disaggregation.transfer: NIXL does not start: {error}") from None

    def offer(self, to: int, body: torch.Tensor) -> tuple[_NixlTicket | None, torch.Tensor]:  # noqa: ARG002
        if not body.numel():
            return None, body
        agent, size = self._agent, body.numel()
        with self._lock:
            for notes in agent.get_new_notifs().values():
                self._free += [_NixlBuffer(number, self._buffers[number]) for number in map(int, notes)]
            number, memory = self._buffer(size)
            memory[:size].copy_(body)
            metadata = agent.get_partial_agent_metadata(agent.get_reg_descs([memory]), inc_conn_info=True)
        return _NixlTicket(self._name, number, memory.data_ptr(), size, metadata), NO_BYTES

    def take(self, source: int, ticket: _NixlTicket | None, inline: torch.Tensor) -> IncomingTensors:  # noqa: ARG002
        if ticket is None:
            return IncomingTensors(inline)
        try:
            return IncomingTensors(self._read(ticket))
        except Exception as error:  # as above
            raise RuntimeError(f"{type(error).__name__}: {error}") from None

    def _read(self, ticket: _NixlTicket) -> torch.Tensor:
        agent = self._agent
        with self._lock:
            if (ticket.owner, ticket.number) not in self._known:
                agent.add_remote_agent(ticket.metadata)
                self._known.add((ticket.owner, ticket.number))
            buffer = self._buffer(ticket.size)
            here = agent.get_xfer_descs([buffer.memory[: ticket.size]])
            there = agent.get_xfer_descs([ticket.region], "DRAM")
            handle = agent.initialize_xfer("READ", here, there, ticket.owner, str(ticket.number).encode())
            state = agent.transfer(handle)
        self._await(handle, state)
        body = buffer.memory[: ticket.size].clone()
        with self._lock:
            agent.release_xfer_handle(handle)
            self._free.append(buffer)
        return body

    def _await(self, handle: Any, state: str) -> None:
        deadline = time.monotonic() + self._patience
        while state != "DONE":
            if state == "ERR" or time.monotonic() > deadline:
                raise RuntimeError(f"a transfer by NIXL ended as {state}")
            time.sleep(_POLL_S)
            with self._lock:
                state = self._agent.check_xfer_state(handle)

    def _buffer(self, size: int) -> _NixlBuffer:
        """The smallest free buffer that is large enough, or a new one."""
        fitting = [buffer for buffer in self._free if buffer.memory.numel() >= size]
        if fitting:
            found = min(fitting, key=lambda buffer: buffer.memory.numel())
            self._free.remove(found)
            return found
        memory = torch.empty(1 << (size - 1).bit_length(), dtype=torch.uint8)
        self._agent.register_memory([memory])
        self._buffers.append(memory)
        return _NixlBuffer(len(self._buffers) - 1, memory)


def require_nixl() -> None:
    """Raises MachineError where NIXL is not installed."""
    if find_spec("nixl") is None:
        raise MachineError(
            "engine.disaggregation.transfer: nixl is not installed: pip install 'schedbench[nixl]' (Linux)"
        )
