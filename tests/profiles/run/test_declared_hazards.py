"""A declared hazard is recognised by both of its accesses; any other on the same memory is reported."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from schedbench.profiles.record.timeline import FoundAccess, FoundHazard, Site
from schedbench.profiles.run.declared_hazards import SIGNS, AccessSign, HazardSign, split_declared

SIGNED = [(name, sign) for name, signs in SIGNS.items() for sign in signs]


def access(sign: AccessSign) -> FoundAccess:
    site = Site("sched/x.py", sign.function or "anywhere", 1, f"... {sign.statement} ...")
    return FoundAccess(sign.op or "op", sign.write, site, sign.stream)


def declared(sign: HazardSign) -> Iterator[FoundHazard]:
    """One finding for each pair of places."""
    for first in sign.first:
        for second in sign.second or (None,):
            later = None if second is None else access(second)
            yield FoundHazard(sign.kind, f"{sign.resource} ...", access(first), later, "")


def others(access: FoundAccess, *, anywhere: bool) -> Iterator[FoundAccess]:
    """Accesses that differ in one respect. ``anywhere``: the place does not matter for the declaration."""
    yield access._replace(stream="transfer")
    yield access._replace(write=not access.write)
    assert access.site is not None
    if not anywhere:
        yield access._replace(site=access.site._replace(function="elsewhere"))
        yield access._replace(site=access.site._replace(statement="x = y"))
        yield access._replace(site=None)


def different(found: FoundHazard) -> Iterator[FoundHazard]:
    yield found._replace(kind="pinned")
    for first in others(found.first, anywhere=False):
        yield found._replace(first=first)
    if found.second is None:
        yield found._replace(second=found.first)
        return
    yield found._replace(second=None)
    yield found._replace(first=found.second, second=found.first)
    for second in others(found.second, anywhere=found.kind == "freed"):
        yield found._replace(second=second)


@pytest.mark.parametrize(("name", "sign"), SIGNED)
def test_a_declared_hazard_is_recognised(name: str, sign: HazardSign) -> None:
    for found in declared(sign):
        hazards = split_declared([found], [name])
        assert hazards.known == (name,) and not hazards.findings


@pytest.mark.parametrize("sign", [sign for _, sign in SIGNED])
def test_a_different_hazard_on_the_same_memory_is_reported(sign: HazardSign) -> None:
    """It differs by stream, direction, function, statement or order of either access, while the names of all states are
    declared."""
    for found in declared(sign):
        for other in different(found):
            assert len(split_declared([other], list(SIGNS)).findings) == 1, other


def test_every_sign_names_the_places_of_both_accesses() -> None:
    """A freed block is the exception: its second access is that of whichever allocation comes next."""
    for _, sign in SIGNED:
        placed = sign.first if sign.kind == "freed" else (*sign.first, *sign.second)
        assert all(place.function and place.statement for place in placed)
        assert bool(sign.second) == (sign.kind != "unread")
