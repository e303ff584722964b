"""Work that is spread over processes."""

from __future__ import annotations

import operator

import pytest

from schedbench.profiles.platform.pool import pool


def test_answers_come_in_order() -> None:
    with pool(3) as each:
        assert list(each(operator.neg, [3, 1, 2])) == [-3, -1, -2]


def test_what_cannot_travel_is_told_and_not_waited_for() -> None:
    with pytest.raises(Exception, match="pickle"), pool(6) as each:
        list(each(lambda number: -number, range(6)))
