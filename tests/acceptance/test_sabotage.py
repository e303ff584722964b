"""A damaged page table, token or length changes the digest, with real values and with tags."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch

from schedbench.profiles.platform.machine import Machine
from schedbench.sched.loop.scheduler import Scheduler
from schedbench.sched.observe import Observer
from schedbench.sched.request import Request
from tests.acceptance.runs import SMALL, digest, digest_observed, resolved

FEW = (*SMALL, "workload.requests=6")
VALUES = ("device.values=real", "device.values=none")
STEPS = (3, 30)  # of the decodes that qualify

Damage = Callable[[Machine, Scheduler], AbstractContextManager[None]]
"""What is done to the device's memory around one range of one step."""


class DamageOnce(Observer):
    """Does its damage once: around the range ``name`` of the ``nth`` decode of at least two requests."""

    def __init__(self, machine: Machine, scheduler: Scheduler, damage: Damage, name: str, nth: int) -> None:
        self._machine = machine
        self._scheduler = scheduler
        self._damage = damage
        self._name = name
        self._left = nth
        self.done = False

    def range(self, name: str, step: int, size: int) -> AbstractContextManager[object]:  # noqa: ARG002
        if name == self._name and self._decodes_several():
            self._left -= 1
            if self._left == 0:
                self.done = True
                return self._damage(self._machine, self._scheduler)
        return nullcontext()

    def _decodes_several(self) -> bool:
        batch = self._scheduler.running_batch
        return batch.forward_mode.is_decode and batch.batch_size > 1


@contextmanager
def swapped_slots(machine: Machine, scheduler: Scheduler) -> Iterator[None]:
    """From now on two requests have each other's slot for their last written token."""
    first, second = scheduler.running_batch.reqs[:2]
    table = machine.peek(scheduler.engine.slots.req_to_token)
    places = [_last(first), _last(second)]
    (one, other) = (table[place].clone() for place in places)
    table[places[0]], table[places[1]] = other, one
    yield


@contextmanager
def other_token(machine: Machine, scheduler: Scheduler) -> Iterator[None]:
    """The relay's row of a request holds another token than was sampled."""
    row = scheduler.running_batch.reqs[0].req_pool_idx
    tokens = machine.peek(scheduler.engine.relay.context.futures.output_tokens_buf)
    tokens[row] = (tokens[row] + 1) % scheduler.engine.config.vocab_size
    yield


@contextmanager
def shorter_by_one(machine: Machine, scheduler: Scheduler) -> Iterator[None]:
    """One forward sees a request without its last token."""
    lengths = _lengths(machine, scheduler)
    lengths[0] -= 1
    yield
    lengths[0] += 1


def _last(request: Request) -> tuple[int, int]:
    assert request.req_pool_idx is not None
    return request.req_pool_idx, request.kv_committed_len - 2


def _lengths(machine: Machine, scheduler: Scheduler) -> torch.Tensor:
    lengths = scheduler.running_batch.seq_lens
    assert lengths is not None
    return machine.peek(lengths)


@contextmanager
def nothing(machine: Machine, scheduler: Scheduler) -> Iterator[None]:  # noqa: ARG001
    yield


def damaged(values: str, damage: Damage, name: str, nth: int) -> str:
    observers: list[DamageOnce] = []

    def listener(machine: Machine, scheduler: Scheduler) -> Observer:
        observers.append(DamageOnce(machine, scheduler, damage, name, nth))
        return observers[0]

    found = digest_observed(resolved("mixed", *FEW, values), listener)
    assert observers[0].done
    return found


@pytest.fixture(scope="module", params=VALUES)
def values(request: pytest.FixtureRequest) -> str:
    mode: str = request.param
    return mode


@pytest.fixture(scope="module")
def sound(values: str) -> str:
    return digest("mixed", *FEW, values)


def test_an_observer_without_damage_changes_nothing(values: str, sound: str) -> None:
    assert damaged(values, nothing, "model", 3) == sound


@pytest.mark.parametrize(
    ("damage", "name"), [(swapped_slots, "model"), (other_token, "resolve"), (shorter_by_one, "model")]
)
@pytest.mark.parametrize("nth", STEPS)
def test_a_wrong_slot_token_or_length_changes_the_digest(
    values: str, sound: str, damage: Damage, name: str, nth: int
) -> None:
    assert damaged(values, damage, name, nth) != sound


class WrongLogprob(Observer):
    def ending(self, request: Request) -> None:
        request.output_logprobs[-1] += 1e-6


def test_a_wrong_log_probability_changes_the_digest() -> None:
    question = resolved("mixed", *FEW, "workload.sampling.logprobs=true")
    right, wrong = (digest_observed(question, lambda *_, x=x: x()) for x in (Observer, WrongLogprob))
    assert right != wrong
