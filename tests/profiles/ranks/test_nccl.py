"""Tensors from device to device between processes, as far as gloo and host memory can show it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from schedbench.profiles.ranks.transports import gpu_of, joinable
from tests.json_programs import rank_processes
from tests.profiles.ranks.device_group_process import PIECE, PIECES

pytestmark = pytest.mark.wide  # three processes once


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """What each rank measured; the last one has no device."""
    with rank_processes("profiles.ranks.device_group_process", 3) as processes:
        said = [process.communicate(timeout=90)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    return [json.loads(text) for text in said]


def test_ranks_that_send_before_they_receive_do_not_deadlock(found: list[dict[str, Any]]) -> None:
    assert [rank["both"] for rank in found] == [[2, 3], [1, 3], [1, 2]]


def test_tensors_arrive_unchanged_and_in_order(found: list[dict[str, Any]]) -> None:
    """The sender doubles its tensors after each send."""
    values = [
        [number, [[2, 3, [[0, f, 2 * f], [3 * f, 4 * f, 5 * f]]], [7 * f], [1, [True]], [0, 4, []]]]
        for number, f in enumerate((1, 2, 4))
    ]
    assert found[1]["in_order"] == values


def test_a_polled_message_is_complete(found: list[dict[str, Any]]) -> None:
    assert found[1]["whole"] is True


def test_all_to_all_includes_a_rank_without_a_device(found: list[dict[str, Any]]) -> None:
    assert [rank["exchanged"] for rank in found] == [[[0, to], [1, to], [2, to]] for to in range(3)]


@pytest.mark.parametrize("way", ["direct_growth", "message_growth"])
def test_sent_tensors_are_freed(found: list[dict[str, Any]], way: str) -> None:
    assert found[0][way] < PIECES * PIECE / 4


@pytest.mark.parametrize(
    ("gpus", "ranks"),
    [
        (["a 0", "a 1"], (0, 1)),
        (["a 0", "b 0", None], (0, 1)),
        (["a 0", "a 0"], ()),
        (["a 0", "a 1", "a 0"], ()),
        (["a 0", None], ()),
    ],
)
def test_a_device_group_has_no_two_ranks_on_one_gpu(gpus: list[str | None], ranks: tuple[int, ...]) -> None:
    assert joinable(gpus) == ranks


def test_ranks_of_a_machine_take_its_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert [gpu_of(rank, 2) for rank in range(3)] == [0, 1, 0]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert gpu_of(5, 4) == 1
