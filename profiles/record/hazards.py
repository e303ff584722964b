"""Accesses to memory that nothing orders, as the hazard checker reports them."""

from __future__ import annotations

from typing import Literal, NamedTuple

from .timeline import Site

HazardKind = Literal["race", "pinned", "freed", "unread"]


class FoundAccess(NamedTuple):
    """One access of a hazard. ``stream`` is "host" where the host itself makes the access."""

    op: str
    write: bool
    site: Site | None
    stream: str


class FoundHazard(NamedTuple):
    """``first`` was issued before ``second`` and nothing orders the two. ``second`` is None for kind "unread": memory
    whose last write is ``first`` and which is never read. ``missing`` is the explanation in words."""

    kind: HazardKind
    resource: str
    first: FoundAccess
    second: FoundAccess | None
    missing: str
