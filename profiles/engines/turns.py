"""The workers of a pair, or data-parallel ranks, which take turns in virtual time (``rank_processes``).

A worker keeps running until it asks what has arrived by its time, or waits.
"""

from __future__ import annotations

import os
import pickle
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, Final

import torch

from ...sched.data_parallel.sync import ROUND
from ...sched.link import FOREVER, LinkError, Message
from ..platform.hardware import LinkProfile
from ..vgpu.device import VirtualGpu
from .messages import end_copies_of
from .rank_processes import Receipt, SentValue, Turn

_ALONE: Final = "nothing comes any more: all workers wait"


class TurnLink:
    """A worker's end of its connections to the others, with the times of a link of the hardware. Messages of one
    sender with one tag arrive in the order in which they were sent."""

    def __init__(self, rank: int, size: int, connection: Connection) -> None:
        self.rank, self.size = rank, size
        self._connection = connection
        self._process = os.getpid()
        self._arrived: defaultdict[tuple[int, str], deque[SentValue]] = defaultdict(deque)
        self._gpu: VirtualGpu
        self.profile: LinkProfile

    @contextmanager
    def opened(self, gpu: VirtualGpu, profile: LinkProfile) -> Iterator[None]:
        """The device whose host this is, and the link's times, for the block."""
        self._gpu, self.profile = gpu, profile
        yield

    def post(self, to: int, tag: str, value: Any, at: int) -> None:
        """Send a value that arrives at ``at``, ns, and takes no time of the host."""
        end_copies_of(self._process)
        self._connection.send((to, SentValue(self.rank, tag, at, pickle.dumps(value))))

    def send(self, to: int, tag: str, value: Any, tensors: Sequence[torch.Tensor] = ()) -> None:
        assert not tensors, "tensors are posted with the time at which they arrive"
        runtime, profile = self._gpu.runtime, self.profile
        if tag == ROUND:  # of the run, not of the engine
            self.post(to, tag, value, runtime.now)
            return
        runtime.now += round(profile.call.value)
        self.post(to, tag, value, runtime.now + round(profile.host_latency.value))

    def receive(self, source: int, tag: str) -> Message:
        """Raises LinkError where nothing can come."""
        while not self._arrived[source, tag]:
            self.sleep_until(FOREVER)
        message = self._arrived[source, tag].popleft()
        return Message(source, pickle.loads(message.body), ())

    def poll(self, tag: str) -> Message | None:
        """The next message that has arrived by the last turn."""
        for (source, found), messages in self._arrived.items():
            if found == tag and messages:
                return Message(source, pickle.loads(messages.popleft().body), ())
        return None

    def take_turn(self) -> None:
        """Receive what has arrived by now."""
        self.sleep_until(self._gpu.runtime.now)

    def sleep_until(self, until: int) -> None:
        """Advance the host's clock to ``until``, ns, or to the next arrival. Raises LinkError where that is never."""
        runtime = self._gpu.runtime
        at = self._wait(Turn(runtime.now, max(until, runtime.now)))
        if at >= FOREVER:
            raise LinkError(_ALONE)
        runtime.now = max(runtime.now, at)

    def _wait(self, turn: Turn | Receipt) -> int:
        """Receive what there is when the rank is to go on. Returns when that is, ns; FOREVER where it is never."""
        end_copies_of(self._process)
        self._connection.send(turn)
        at: int
        at, arrived = self._connection.recv()
        for message in arrived:
            self._arrived[message.source, message.tag].append(message)
        return at
