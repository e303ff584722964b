"""The enumerator of mutations: the places that it finds, and the validity of the mutated source."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.mutations.places import LEFT_OUT, Place, places, places_of

ROOT = Path(__file__).resolve().parents[2]

SOURCE = b"""\
def launch(streams, batch, result, module):
    with streams.on(streams.forward), isolated(batch):
        streams.wait(streams.forward, streams.schedule)
        kept = batch.lengths.clone()
        batch.lengths = batch.lengths + 1
        result.ids = kept.to("cpu", non_blocking=True)
        result.copy_done = module.Event()
        result.copy_done.record()
    kept.record_stream(
        streams.forward,
    )
    streams.kept_alive[0] = [batch, *result.extra]
    return torch.tensor([1], pin_memory=True).cpu()
"""
TAKEN = {
    'streams.on(streams.forward) -> __import__("contextlib").nullcontext()',
    'isolated(batch) -> __import__("contextlib").nullcontext()',
    "streams.wait(streams.forward, streams.schedule) -> pass",
    "batch.lengths.clone() -> batch.lengths",
    "batch.lengths = batch.lengths + 1 -> batch.lengths += 1",
    "True -> False",
    "module.Event() -> None",
    "result.copy_done.record() -> pass",
    "kept.record_stream( streams.forward, ) -> pass",
    "streams.kept_alive[0] = [batch, *result.extra] -> pass",
    "batch -> *()",
    "*result.extra -> *()",
    'torch.tensor([1], pin_memory=True).cpu() -> torch.tensor([1], pin_memory=True).to("cpu", non_blocking=True)',
}


def mutated(place: Place) -> str:
    return place.mutated(SOURCE).decode()


def test_every_ordering_or_keeping_statement_is_found() -> None:
    found = places_of("launch.py", SOURCE)
    assert {f"{place.was} -> {place.becomes}" for place in found} == TAKEN
    assert Counter(place.kind for place in found) == {
        "wait": 1,
        "event": 2,
        "reference": 4,
        "copy": 2,
        "context": 2,
        "pinned": 1,
        "asynchronous": 2,
    }


@pytest.mark.parametrize("place", places_of("launch.py", SOURCE), ids=str)
def test_one_place_is_changed_and_no_line_moves(place: Place) -> None:
    before, after = SOURCE.decode().splitlines(), mutated(place).splitlines()
    ast.parse(mutated(place))
    assert len(after) == len(before)
    different = {
        number for number, pair in enumerate(zip(before, after, strict=True), 1) if len(set(pair)) > 1
    }
    assert different
    assert different <= set(range(place.first, place.last + 1))


@pytest.mark.wide
def test_every_place_of_the_scheduler_can_be_removed() -> None:
    found = places(ROOT)
    assert len({(place.file, place.start, place.end) for place in found}) == len(found)
    assert not {place.file for place in found} & LEFT_OUT
    for file in {place.file for place in found}:
        source = (ROOT / file).read_bytes()
        plain = ast.dump(ast.parse(source))
        for place in found:
            if place.file == file:
                assert ast.dump(ast.parse(place.mutated(source))) != plain, str(place)


NAMED = re.compile(r"^\| `(sched/[\w/]+\.py)` (\w+) \| (\w+): `(.+?)…?` →", re.MULTILINE)


def test_places_named_in_the_docs_exist() -> None:
    """A change that moves such a place has to change its name in the docs."""
    named = NAMED.findall((ROOT / "docs/mutations.md").read_text())
    found = [(place.file, place.function, place.kind, place.was) for place in places(ROOT)]
    assert len(named) == 18 + 17 + 60 + 59
    for *where, was in named:
        assert any([*there] == where and text.startswith(was) for *there, text in found), (where, was)


def test_the_docs_name_no_lines() -> None:
    assert not re.search(r"\.py:\d", (ROOT / "docs/mutations.md").read_text())
