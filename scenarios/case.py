"""The ``case`` section: a change that somebody reported on, and what a comparison should make of it."""

from __future__ import annotations

from typing import Literal

from .fields import Section


class Case(Section):
    """``source`` reported ``reported`` of going from side A to side B. The sides are written as for ``compare``;
    from A to B ``metric`` should become what ``expect`` says. A run takes no notice of it."""

    source: str
    a: str
    b: str
    expect: Literal["better", "worse", "no change"]
    metric: str
    reported: str
