"""A declared hazard is recognised by both of its accesses; any other on the same memory is reported."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from schedbench.profiles.record.result import HazardAccess, HazardFinding, SitePart
from schedbench.profiles.run.declared_hazards import SIGNS, AccessSign, HazardSign, split_declared

SIGNED = [(name, sign) for name, signs in SIGNS.items() for sign in signs]


def access(sign: AccessSign) -> HazardAccess:
    text = f"... {sign.statement} ..."
    site = SitePart(file="sched/x.py", function=sign.function or "anywhere", line=1, statement=text)
    return HazardAccess(op=sign.op or "op", write=sign.write, site=site, stream=sign.stream)


def declared(sign: HazardSign) -> Iterator[HazardFinding]:
    """One finding for each pair of places."""
    for first in sign.first:
        for second in sign.second or (None,):
            later = None if second is None else access(second)
            yield HazardFinding(
                kind=sign.kind, resource=f"{sign.resource} ...", first=access(first), second=later, missing=""
            )


def others(access: HazardAccess, *, anywhere: bool) -> Iterator[HazardAccess]:
    """Accesses that differ in one respect. ``anywhere``: the place does not matter for the declaration."""
    yield access.model_copy(update={"stream": "transfer"})
    yield access.model_copy(update={"write": not access.write})
    assert access.site is not None
    if not anywhere:
        yield access.model_copy(update={"site": access.site.model_copy(update={"function": "elsewhere"})})
        yield access.model_copy(update={"site": access.site.model_copy(update={"statement": "x = y"})})
        yield access.model_copy(update={"site": None})


def different(found: HazardFinding) -> Iterator[HazardFinding]:
    yield found.model_copy(update={"kind": "pinned"})
    for first in others(found.first, anywhere=False):
        yield found.model_copy(update={"first": first})
    if found.second is None:
        yield found.model_copy(update={"second": found.first})
        return
    yield found.model_copy(update={"second": None})
    yield found.model_copy(update={"first": found.second, "second": found.first})
    for second in others(found.second, anywhere=found.kind == "freed"):
        yield found.model_copy(update={"second": second})


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
