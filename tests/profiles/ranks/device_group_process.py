"""One of three ranks, of which the first two share a device group; prints what the rank measured as JSON. Started as
``python -m tests.profiles.ranks.device_group_process RANK PORT``. Gloo replaces NCCL, and the host's memory a GPU's."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from schedbench.profiles.ranks.process_link import ProcessLink
from schedbench.profiles.ranks.transports import DirectTransport
from schedbench.sched.link import FOREVER
from tests.profiles.ranks.slow_peer_process import host_link

JOINED = (0, 1)
SLOWNESS = 0.4  # seconds
LARGE = 1 << 23  # bytes: more than any transport takes without a receiver
PIECES, PIECE = 200, 1 << 20


class CompletableWork:
    """Gloo's work with the interface of NCCL's, which reports whether it is completed."""

    def __init__(self, work: Any) -> None:
        self._thread = Thread(target=work.wait, daemon=True)
        self._thread.start()

    def is_completed(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()


class SlowTransport(DirectTransport):
    """``pause``: seconds between the message and the tensors."""

    pause = 0.0

    def push(self, to: int, body: torch.Tensor) -> None:
        time.sleep(self.pause)
        super().push(to, body)


def completable(post: Callable[..., Any]) -> Callable[..., Any]:
    def posted(tensor: torch.Tensor, peer: int, group: Any = None) -> Any:
        work = post(tensor, peer, group=group)
        return work if group is None else CompletableWork(work)

    return posted


def connected(rank: int, port: int) -> tuple[ProcessLink, SlowTransport]:
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=3,
        timeout=timedelta(seconds=300),
    )
    dist.isend, dist.irecv = completable(dist.isend), completable(dist.irecv)
    transport = SlowTransport(torch.device("cpu"), JOINED, "gloo")
    types = {
        "large": None,
        "numbers": int,
        "slow": float,
        "parts": tuple[int, ...],
        "piece": None,
        "thanks": None,
    }
    return host_link(("one", "two", "context"), types, patience=30, transport=transport), transport


def both_send_first(link: ProcessLink) -> list[int]:
    """Each rank sends to each before any receives."""
    others = [rank for rank in range(link.size) if rank != link.rank]
    for peer in others:
        link.send(peer, "large", None, [torch.full((LARGE,), link.rank + 1, dtype=torch.uint8)])
    return [int(link.receive(peer, "large").tensors[0].unique().item()) for peer in others]


def in_order(link: ProcessLink) -> list[Any]:
    """Returns tensors of all shapes and kinds in the order in which they were sent, although the sender changes them
    afterwards."""
    sent = [torch.arange(6.0).view(2, 3), torch.tensor(7), torch.tensor([True]), torch.empty(0, 4)]
    if link.rank == 0:
        for number in range(3):
            link.send(1, "numbers", number, sent)
            link.flush("numbers")
            for tensor in sent:
                tensor.add_(tensor)
    if link.rank != 1:
        return []
    came = [link.receive(0, "numbers") for _ in range(3)]
    return [(message.value, [(*each.shape, each.tolist()) for each in message.tensors]) for message in came]


def slowly(link: ProcessLink, transport: SlowTransport) -> bool | None:
    """Whether a polled message is complete."""
    if link.rank == 0:
        transport.pause = SLOWNESS
        link.send(1, "slow", time.monotonic(), [torch.ones(3)])
        transport.pause = 0.0
    if link.rank != 1:
        return None
    while (message := link.poll("slow")) is None:
        link.wait(("slow",), FOREVER)
    return time.monotonic() - message.value >= SLOWNESS and message.tensors[0].tolist() == [1, 1, 1]


def exchanged(link: ProcessLink) -> list[Any]:
    own = [torch.tensor([link.rank, to]) for to in range(link.size)]
    return [part.tolist() for part in link.all_to_all("parts", own)]


def growth(link: ProcessLink, to: int) -> int:
    """Returns by how many bytes this process grew while it sent many pieces to that rank."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(PIECES):
        if link.rank == 0:
            link.send(to, "piece", None, [torch.ones(PIECE, dtype=torch.uint8)])
            link.receive(to, "thanks")
        elif link.rank == to:
            link.receive(0, "piece")
            link.send(0, "thanks", None)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def main(rank: int, port: int) -> None:
    link, transport = connected(rank, port)
    with link:
        found = {
            "both": both_send_first(link),
            "in_order": in_order(link),
            "whole": slowly(link, transport),
            "exchanged": exchanged(link),
            "direct_growth": growth(link, 1),
            "message_growth": growth(link, 2),
        }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
