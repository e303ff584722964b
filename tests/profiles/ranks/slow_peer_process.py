"""One of two ranks with a short time-out: the second sends one late message and hangs when that has come, the first
prints what it receives.

Started as ``python -m tests.profiles.ranks.slow_peer_process RANK PORT``.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from schedbench.profiles.ranks.process_link import ProcessLink
from schedbench.profiles.ranks.staging import TensorStaging
from schedbench.profiles.ranks.transports import TensorTransport
from schedbench.sched.link import FOREVER, LinkError

PATIENCE = 5.0  # seconds


class Clock:
    def now(self) -> int:
        return time.monotonic_ns()

    def sleep_until(self, at: int) -> None: ...


def host_link(
    names: Sequence[str],
    types: Mapping[str, Any],
    *,
    patience: float,
    transport: TensorTransport | None = None,
) -> ProcessLink:
    """A link between ranks whose tensors are in the host's memory."""
    staging, transport = TensorStaging(torch.device("cpu")), transport or TensorTransport()
    return ProcessLink(names, staging, Clock(), patience=patience, transport=transport, types=types)


def connected(rank: int, port: int) -> ProcessLink:
    """Connects once both ranks are there, however long the start takes."""
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timedelta(seconds=60))
    store.set(f"there {rank}", "yes")
    store.wait(["there 0", "there 1"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=PATIENCE))
    return host_link(("the one", "the other"), {"word": str}, patience=PATIENCE)


def listen(link: ProcessLink) -> None:
    while (message := link.poll("word")) is None:
        link.wait(("word",), FOREVER)
    print(message.value, message.tensors[0].tolist(), flush=True)
    link.send(1, "word", "thanks")
    try:
        while True:
            link.wait(("word",), FOREVER)
    except LinkError as error:
        print(error, flush=True)


def main(rank: int, port: int) -> None:
    link = connected(rank, port)
    if rank:
        time.sleep(2 * PATIENCE)
        link.send(0, "word", "late", [torch.arange(3)])
        link.receive(0, "word")
        os.kill(os.getpid(), signal.SIGSTOP)
    listen(link)
    os._exit(0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
